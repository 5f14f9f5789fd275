"""Speed over an axis as data: which marks, error bars and curves the figure holds."""

from pathlib import Path
from typing import Any

import pytest

from service.config.space import GLOBAL_BATCH, LOADER_WORKERS, NUM_WORKERS
from service.report.charts import Figure
from service.report.model_curve import curve, model_of
from service.report.records import Records, records_of_run
from service.report.speed_by_axis import over_axis
from tests.service.report.runs import shown, sweep_dir


def marks(figure: Figure) -> list[dict[str, Any]]:
    return [trace for trace in figure.traces if "markers" in trace.get("mode", "")]


def test_speed_over_an_axis_has_a_series_for_each_number_of_gpus_near_the_winners(records: Records) -> None:
    best = records.best
    assert best is not None
    figure = shown(over_axis(records.rows, best, GLOBAL_BATCH, None, "GPU"))
    faint, *series = marks(figure)
    assert [one["name"] for one in series] == ["1 GPU", "2 GPUs", "4 GPUs"]
    assert all(one["x"] == [64, 128, 256, 512] for one in series)
    assert len(faint["x"]) == 36 - 12
    assert max(series[2]["y"]) == best.metrics["images_per_s"]
    assert len({one["marker"]["symbol"] for one in series}) == len({one["marker"]["color"] for one in series}) == 3


def test_the_error_bars_are_standard_errors_of_the_speed(records: Records) -> None:
    best = records.best
    assert best is not None
    bars = marks(shown(over_axis(records.rows, best, NUM_WORKERS, None, "GPU")))[-1]["error_y"]["array"]
    row = next(row for row in records.rows if row.scale.num_workers == 4)
    assert 0 < row.error < 0.05
    assert all(bar > 0 for bar in bars)


def test_the_models_curve_passes_near_the_marks(records: Records) -> None:
    best = records.best
    assert best is not None
    model = model_of(records.result, records.rows)
    assert model is not None
    point = {NUM_WORKERS: best.scale.num_workers, GLOBAL_BATCH: 64, LOADER_WORKERS: best.scale.loader_workers}
    drawn = curve(model, point, GLOBAL_BATCH, 64, 512)
    assert (drawn.at[0], drawn.at[-1]) == (64, 512)
    same = [row for row in records.rows if all(row.scale.by_key[key] == point[key] for key in (NUM_WORKERS, LOADER_WORKERS))]
    for row in same:
        nearest = min(range(len(drawn.at)), key=lambda n: abs(drawn.at[n] - row.scale.global_batch_size))
        assert drawn.images_per_s[nearest] == pytest.approx(row.metrics["images_per_s"], rel=0.25)
        assert drawn.low[nearest] < drawn.images_per_s[nearest] < drawn.high[nearest]


def test_an_axis_of_names_is_shown_as_names(tmp_path: Path) -> None:
    records = records_of_run(sweep_dir(tmp_path / "s", {GLOBAL_BATCH: [64, 128], "precision": ["fp32", "bf16"]}).root)
    assert records.best is not None
    figure = shown(over_axis(records.rows, records.best, "precision", None, "GPU"))
    assert figure.layout["xaxis"]["type"] == "category"
    assert set(marks(figure)[-1]["x"]) == {"bf16", "fp32"}


def test_many_values_of_the_second_axis_are_those_around_the_winner(tmp_path: Path) -> None:
    space = {NUM_WORKERS: list(range(1, 13)), GLOBAL_BATCH: [120, 240]}
    records = records_of_run(sweep_dir(tmp_path / "s", space).root)
    assert records.best is not None
    figure = shown(over_axis(records.rows, records.best, GLOBAL_BATCH, None, "GPU"))
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
        drawn = {trace["name"]: trace["marker"]["color"] for trace in marks(shown(over_axis(rows, best, key, None, "GPU")))}
        assert len(set(drawn.values())) == len(drawn)
        for name, color in drawn.items():
            colors.setdefault(name, set()).add(color)
    assert all(len(found) == 1 for found in colors.values())


def test_every_trial_with_a_speed_is_a_mark_and_the_caption_counts_the_others(tmp_path: Path) -> None:
    space = {NUM_WORKERS: list(range(1, 13)), GLOBAL_BATCH: [120, 240]}
    ends = {"000": {"status": "oom", "metrics": {}, "steps_s": []}, "001": {"status": "untested", "metrics": {}, "steps_s": []}}
    records = records_of_run(sweep_dir(tmp_path / "s", space, ends=ends).root)
    assert records.best is not None
    figure = shown(over_axis(records.rows, records.best, GLOBAL_BATCH, None, "GPU"))
    assert sum(len(trace["x"]) for trace in marks(figure)) == 22
    assert len(figure.numbers.rows) == 22
    assert figure.caption.endswith(" Not shown: 1 oom of 23 trials.")
