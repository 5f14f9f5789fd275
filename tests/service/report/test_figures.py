"""A sweep's figures as data: which marks, curves and numbers they hold."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from service.config.space import GLOBAL_BATCH, LOADER_WORKERS, NUM_WORKERS
from service.report.charts import PHASE_COLORS
from service.report.figures import accuracy_latency, efficiency, over_axis, pareto, phases
from service.report.records import Records, axes, by_speed, records_of_run
from service.report.tables import trial_frame
from service.runs.result import TrialRow
from tests.service.report.runs import Shown, shown, sweep_dir
from trainables.metrics.phases import ALL_PHASES


def trials(records: Records) -> pd.DataFrame:
    return trial_frame(records.result, by_speed(records.rows))


def axis_figure(records: Records, key: str, rows: Sequence[TrialRow] = ()) -> Shown:
    """The speed over an axis, of all trials or of these."""
    rows = rows or records.rows
    return shown(over_axis(trial_frame(records.result, by_speed(rows)), axes(rows), key, "GPU"))


def marks(figure: Shown) -> list[dict[str, Any]]:
    return [trace for trace in figure.traces if "markers" in trace.get("mode", "")]


def test_phases_are_stacked_per_trial_the_fastest_first(records: Records) -> None:
    figure = shown(phases(trials(records), "trial"))
    ranked = sorted(records.rows, key=lambda row: -row.metrics["images_per_s"])
    assert figure.layout["barmode"] == "stack"
    assert all(trace["x"] == [row.id for row in ranked] for trace in figure.traces)
    assert [trace["name"] for trace in figure.traces] == ["data", "h2d", "teacher", "student", "backward", "optimizer"]
    height = sum(trace["y"][0] for trace in figure.traces)
    assert height == pytest.approx(1000 / ranked[0].metrics["images_per_s"], rel=0.01)


def test_each_phase_has_a_color_of_its_own() -> None:
    assert tuple(PHASE_COLORS) == ALL_PHASES
    assert len(set(PHASE_COLORS.values())) == len(ALL_PHASES)


def test_efficiency_is_speed_a_gpu_compared_with_the_fewest_gpus(records: Records) -> None:
    assert records.best is not None
    figure = shown(efficiency(trials(records), records.best, "GPU"))
    assert [(line["y0"], line["y1"]) for line in figure.layout["shapes"]] == [(100, 100)]
    top = figure.traces[0]
    speeds = {n: max(row.metrics["images_per_s"] for row in records.rows if row.scale.num_workers == n) for n in (1, 2, 4)}
    assert top["x"] == [1, 2, 4]
    assert top["y"] == pytest.approx([100 * speeds[n] / n / speeds[1] for n in (1, 2, 4)])


def test_nothing_on_the_front_is_beaten_in_both_and_everything_else_is(records: Records) -> None:
    front = [row[0] for row in shown(pareto(trials(records), "GPU")).numbers.rows]

    def beaten(row: TrialRow) -> bool:
        speed, cost = row.metrics["images_per_s"], row.metrics["gpu_s_per_epoch"]
        return any(
            other.metrics["images_per_s"] >= speed and other.metrics["gpu_s_per_epoch"] <= cost and other is not row
            for other in records.rows
        )

    assert [beaten(row) for row in records.rows] == [row.id not in front for row in records.rows]


def test_the_front_that_a_search_has_named_is_the_one_that_is_marked(records: Records) -> None:
    named = [records.rows[0].id, records.rows[5].id]
    figure = shown(pareto(trials(records), "GPU", named))
    assert {row[0] for row in figure.numbers.rows} == set(named)
    drawn = next(trace for trace in figure.traces if trace["name"] == "Pareto front of the search")
    assert set(drawn["y"]) == {records.rows[index].metrics["images_per_s"] for index in (0, 5)}


def test_figures_without_data_are_left_out(tmp_path: Path) -> None:
    records = records_of_run(sweep_dir(tmp_path / "s", {GLOBAL_BATCH: [64]}).root)
    assert records.best is not None
    assert axes(records.rows) == []
    assert efficiency(trials(records), records.best, "GPU") is None
    assert pareto(trials(records), "GPU") is None
    assert phases(trials(records).assign(**{"step ms": math.nan}), "trial") is None


def test_speed_over_an_axis_has_a_series_for_each_number_of_gpus_near_the_winners(records: Records) -> None:
    best = records.best
    assert best is not None
    figure = axis_figure(records, GLOBAL_BATCH)
    faint, *series = marks(figure)
    assert [one["name"] for one in series] == ["1 GPU", "2 GPUs", "4 GPUs"]
    assert all(one["x"] == [64, 128, 256, 512] for one in series)
    assert len(faint["x"]) == 36 - 12
    assert max(series[2]["y"]) == best.metrics["images_per_s"]
    assert len({one["marker"]["symbol"] for one in series}) == len({one["marker"]["color"] for one in series}) == 3


def test_the_error_bars_are_standard_errors_of_the_speed(records: Records) -> None:
    fastest = marks(axis_figure(records, NUM_WORKERS))[-1]
    assert all(0 < bar < 0.05 * speed for bar, speed in zip(fastest["error_y"]["array"], fastest["y"], strict=True))


def test_an_axis_of_names_is_shown_as_names(tmp_path: Path) -> None:
    records = records_of_run(sweep_dir(tmp_path / "s", {GLOBAL_BATCH: [64, 128], "precision": ["fp32", "bf16"]}).root)
    assert records.best is not None
    figure = axis_figure(records, "precision")
    assert figure.layout["xaxis"]["type"] == "category"
    assert set(marks(figure)[-1]["x"]) == {"bf16", "fp32"}


def test_many_values_of_the_second_axis_are_those_around_the_winner(tmp_path: Path) -> None:
    space = {NUM_WORKERS: list(range(1, 13)), GLOBAL_BATCH: [120, 240]}
    records = records_of_run(sweep_dir(tmp_path / "s", space).root)
    assert records.best is not None
    figure = axis_figure(records, GLOBAL_BATCH)
    named = [trace["name"] for trace in marks(figure) if trace["name"] != "other trials"]
    assert len(named) == 6
    assert f"{records.best.scale.num_workers} GPUs" in named


def test_a_value_of_the_second_axis_has_one_color_in_all_figures_and_no_other_value_has_it(tmp_path: Path) -> None:
    space = {NUM_WORKERS: list(range(1, 13)), GLOBAL_BATCH: [120, 240], LOADER_WORKERS: [1, 2, 3]}
    # Of the best batch and the best loader workers only some numbers of GPUs have run.
    records = records_of_run(sweep_dir(tmp_path / "s", space).root)
    best = records.best
    assert best is not None
    count = best.scale.num_workers
    loaders = best.scale.loader_workers
    rows = [row for row in records.rows if row.scale.loader_workers != loaders or row.scale.num_workers in (1, 7, count)]
    colors: dict[str, set[str]] = {}
    for key in (GLOBAL_BATCH, LOADER_WORKERS):
        drawn = {trace["name"]: trace["marker"]["color"] for trace in marks(axis_figure(records, key, rows))}
        assert len(set(drawn.values())) == len(drawn)
        for name, color in drawn.items():
            colors.setdefault(name, set()).add(color)
    assert all(len(found) == 1 for found in colors.values())


def test_every_trial_with_a_speed_is_a_mark_and_no_other(tmp_path: Path) -> None:
    space = {NUM_WORKERS: list(range(1, 13)), GLOBAL_BATCH: [120, 240]}
    ends = {"000": {"status": "oom", "metrics": {}, "steps_s": []}, "001": {"status": "untested", "metrics": {}, "steps_s": []}}
    records = records_of_run(sweep_dir(tmp_path / "s", space, ends=ends).root)
    assert records.best is not None
    figure = axis_figure(records, GLOBAL_BATCH)
    assert sum(len(trace["x"]) for trace in marks(figure)) == 22
    assert len(figure.numbers.rows) == 22


def test_students_that_a_sweep_compares_have_accuracy_against_latency(tmp_path: Path, records: Records) -> None:
    measured = {"resnet8": (70.0, 1.0), "resnet14": (69.0, 2.0), "resnet20": (75.0, 3.0)}
    sweep = sweep_dir(tmp_path / "s", {"student.model": list(measured)})
    swept = records_of_run(sweep.root)
    for row, (top1_pct, inference_ms) in zip(swept.rows, measured.values(), strict=True):
        row.metrics.update(top1_pct=top1_pct, inference_ms=inference_ms)
    figure = shown(accuracy_latency(trials(swept)))
    assert [trace["name"] for trace in figure.traces[:3]] == list(measured)
    assert [row[1] for row in figure.numbers.rows] == ["resnet8", "resnet20"]
    front = next(trace for trace in figure.traces if trace["name"] == "Pareto front")
    assert (list(front["x"]), list(front["y"])) == ([1.0, 3.0], [70.0, 75.0])
    assert accuracy_latency(trials(records)) is None
