"""A sweep's figures as data: which marks, curves and numbers they hold."""

from pathlib import Path
from typing import Any

import pytest

from service.config.space import GLOBAL_BATCH, NUM_WORKERS
from service.report.figures import PHASE_COLORS, efficiency, pareto, pareto_rows, phases, waits
from service.report.records import Records, axes, records_of_run
from service.report.speed_by_axis import over_axis
from tests.service.report.runs import shown, sweep_dir
from trainables.metrics.phases import ALL_PHASES


def test_phases_are_stacked_per_trial_the_fastest_first(records: Records) -> None:
    figure = shown(phases(records.rows, "GPU"))
    ranked = sorted(records.rows, key=lambda row: -row.metrics["images_per_s"])
    assert figure.layout["barmode"] == "stack"
    assert all(trace["x"] == [row.id for row in ranked] for trace in figure.traces)
    assert [trace["name"] for trace in figure.traces] == ["data", "h2d", "teacher", "student", "backward", "optimizer"]
    height = sum(trace["y"][0] for trace in figure.traces)
    assert height == pytest.approx(1000 / ranked[0].metrics["images_per_s"], rel=0.01)


def test_each_phase_has_a_color_of_its_own() -> None:
    assert tuple(PHASE_COLORS) == ALL_PHASES
    assert len(set(PHASE_COLORS.values())) == len(ALL_PHASES)


def test_waits_reach_from_the_least_to_the_most(records: Records) -> None:
    figure = shown(waits(records.rows, "GPU"))
    first, m = figure.traces[0], max(records.rows, key=lambda row: row.metrics["images_per_s"]).metrics
    assert first["y"][0] + first["error_y"]["array"][0] == pytest.approx(m["phase/data_max_ms"])
    assert first["y"][0] - first["error_y"]["arrayminus"][0] == pytest.approx(m["phase/data_min_ms"])


def test_efficiency_is_speed_a_gpu_compared_with_the_fewest_gpus(records: Records) -> None:
    assert records.best is not None
    figure = shown(efficiency(records.rows, records.best, "GPU"))
    assert [(line["y0"], line["y1"]) for line in figure.layout["shapes"]] == [(100, 100)]
    top = figure.traces[0]
    speeds = {n: max(row.metrics["images_per_s"] for row in records.rows if row.scale.num_workers == n) for n in (1, 2, 4)}
    assert top["x"] == [1, 2, 4]
    assert top["y"] == pytest.approx([100 * speeds[n] / n / speeds[1] for n in (1, 2, 4)])


def test_nothing_on_the_front_is_beaten_in_both_and_everything_else_is(records: Records) -> None:
    front = pareto_rows(records.rows)

    def beaten(row: Any) -> bool:
        speed, cost = row.metrics["images_per_s"], row.metrics["gpu_s_per_epoch"]
        return any(
            other.metrics["images_per_s"] >= speed and other.metrics["gpu_s_per_epoch"] <= cost and other is not row
            for other in records.rows
        )

    assert [beaten(row) for row in records.rows] == [row not in front for row in records.rows]
    assert shown(pareto(records.rows, "GPU")).numbers.rows[0][0] == front[0].id


def test_the_front_that_a_search_has_named_is_the_one_that_is_marked(records: Records) -> None:
    named = [records.rows[0].id, records.rows[5].id]
    figure = shown(pareto(records.rows, "GPU", named))
    assert {row[0] for row in figure.numbers.rows} == set(named)
    drawn = next(trace for trace in figure.traces if trace["name"] == "the search's front")
    assert set(drawn["y"]) == {records.rows[index].metrics["images_per_s"] for index in (0, 5)}


def test_figures_without_data_are_left_out(tmp_path: Path) -> None:
    records = records_of_run(sweep_dir(tmp_path / "s", {GLOBAL_BATCH: [64]}).root)
    assert records.best is not None
    assert axes(records.rows) == []
    assert efficiency(records.rows, records.best, "GPU") is None
    assert pareto(records.rows, "GPU") is None
    assert over_axis(records.rows, records.best, GLOBAL_BATCH, None, "GPU") is None
    assert phases([], "GPU") is None
    assert waits([], "GPU") is None


def test_each_figure_of_trials_says_which_are_not_in_it(tmp_path: Path) -> None:
    ends = {
        "000": {"status": "failed", "metrics": {}, "steps_s": []},
        "001": {"status": "infeasible", "metrics": {}, "steps_s": []},
    }
    records = records_of_run(sweep_dir(tmp_path / "s", {NUM_WORKERS: [1, 2, 4], GLOBAL_BATCH: [64, 128]}, ends=ends).root)
    for name in ("phase/step_ms", "phase/data_max_ms", "epoch_s"):
        del records.rows[2].metrics[name]
    assert shown(phases(records.rows, "GPU")).caption.endswith(
        " Not shown: 1 failed, 1 infeasible, 1 without phase times of 6 trials."
    )
    assert shown(waits(records.rows, "GPU")).caption.endswith(" Not shown: 1 failed, 1 infeasible, 1 without waits of 6 trials.")
    assert shown(pareto(records.rows, "GPU")).caption.endswith(
        " Not shown: 1 failed, 1 infeasible, 1 without a cost of 6 trials."
    )
