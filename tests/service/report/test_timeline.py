"""Figures over time from what stages write while they run."""

from pathlib import Path
from typing import Any

import pytest

from service.report.hardware import hardware
from service.report.records import History, read_history
from service.report.timeline import accuracy, downsampled, drift, losses_figure, recorded
from service.runs.run_log import read_log
from tests.run_log import add, numbers
from tests.service.report.runs import shown, typed_row
from trainables.rundir import RunDir

COUNTS = {"long": 10_001, "just": 401, "short": 400}


def record(kind: str, step: int, epoch: float, at_s: float, **metrics: float) -> dict[str, Any]:
    return {"kind": kind, "step": step, "epoch": epoch, "time_ms": 1e12 + 1e3 * at_s, "metrics": metrics}


def trained(label: str, epochs_s: list[float], **more: float) -> History:
    lines, at = [record("start", 0, 0, 0.0, steps_per_epoch=10)], 0.0
    for epoch, seconds in enumerate(epochs_s, start=1):
        at += seconds + 2.0
        clock = {"epoch/train_s": seconds, "epoch/eval_s": 2.0}
        lines.append(record("epoch", 10 * epoch, epoch, at, **{**clock, "val/top1_pct": 10.0 * epoch, **more}))
    return History(label, lines)


def test_an_epochs_time_is_that_of_its_steps_whatever_came_between() -> None:
    h = trained("student", [175.0, 180.0, 199.0])
    resumed = [*h.lines, record("resume", 35, 3, 7000.0), record("epoch", 40, 4, 8000.0, **{"epoch/train_s": 98.0})]
    assert shown(drift([History("student", resumed)], [])).traces[0]["y"] == [175.0, 180.0, 199.0, 98.0]


def test_drift_is_described_in_words() -> None:
    figure = drift([trained("student", [200.0, 175.0, 180.0, 199.0])], [])
    assert figure is not None
    assert "student 175 → 199 s (+14%)" in figure.caption
    assert drift([trained("student", [175.0, 180.0])], []) is None


def test_accuracy_is_over_wall_time_in_a_unit_that_suits() -> None:
    figure = accuracy([trained("trial 000", [58.0] * 30), trained("trial 001", [28.0] * 30)], ["trial 001"])
    assert figure is not None
    assert figure.layout["xaxis"]["title"]["text"] == "min"
    chosen = figure.traces[-1]
    assert (chosen["name"], chosen["x"][-1], chosen["y"][0]) == ("trial 001", 15.0, 10.0)
    assert accuracy([History("trial 000", [record("start", 0, 0, 0.0)])], []) is None


def test_a_trial_has_one_color_in_both_figures_and_those_that_were_not_chosen_are_faint() -> None:
    histories = [trained(f"trial {number:03d}", [10.0] * 4) for number in range(9)]
    chosen = [f"trial {number:03d}" for number in (8, 2, 5, 0, 1, 3, 4)]
    drawn = [
        {trace["name"]: trace["line"]["color"] for trace in shown(figure).traces if trace.get("opacity", 1.0) == 1.0}
        for figure in (accuracy(histories, chosen), drift(histories, chosen))
    ]
    assert drawn[0] == drawn[1]
    assert list(drawn[0]) == chosen[:6]
    for figure in (accuracy(histories, chosen), drift(histories, chosen)):
        assert len(shown(figure).traces) == len(shown(figure).numbers.rows) == 9
        assert "In color: the best and the most accurate; 3 others faint." in shown(figure).caption


def test_a_trial_keeps_its_color_where_a_better_one_is_not_in_the_figure() -> None:
    histories = [trained("trial 000", [10.0] * 2), trained("trial 001", [10.0] * 4)]
    chosen = ["trial 000", "trial 001"]
    assert shown(drift(histories, chosen)).traces[0]["line"] == shown(accuracy(histories, chosen)).traces[1]["line"]


def test_trials_that_a_figure_over_time_leaves_out_are_counted() -> None:
    histories = [trained(f"trial {number:03d}", [10.0] * (2 if number == 3 else 4)) for number in range(100)]
    rows = [typed_row({"id": f"{number:03d}", "status": "ok", "metrics": {"images_per_s": 1.0}}) for number in range(100)]
    rows += [typed_row({"id": "100", "status": "oom"}), typed_row({"id": "101", "status": "untested"})]
    sentence = shown(accuracy(histories, ["trial 000"], rows)).caption
    assert sentence.endswith("the most accurate; 60 others faint, 39 more in the numbers alone. Not shown: 1 oom of 101 trials.")
    assert shown(drift(histories, ["trial 000"], rows)).caption.endswith(
        "Not shown: 1 oom, 1 without 3 whole epochs of 101 trials."
    )


def test_hardware_has_a_line_a_gpu_and_of_many_the_mean_and_the_band() -> None:
    def run(gpus: int) -> list[Any]:
        temperatures = {f"epoch/node{gpu // 8}/gpu{gpu % 8}/temperature_c": 60.0 + gpu for gpu in range(gpus)}
        return hardware([trained("student", [10.0] * 3, **temperatures)])

    (few,) = run(2)
    assert [trace["name"] for trace in few.traces] == ["node0/gpu0", "node0/gpu1"]
    (many,) = run(16)
    assert [trace.get("name") for trace in many.traces] == [None, "mean of 16"]
    assert many.traces[1]["y"] == pytest.approx([67.5] * 3)
    assert "From 60 to 75 °C" in many.caption
    assert hardware([]) == []


def test_a_loss_that_is_not_finite_is_left_out() -> None:
    h = History("student", [record("step", n, n / 10, n, **{"train/loss": 1.0 if n else float("nan")}) for n in range(5)])
    figure = losses_figure([h])
    assert figure is not None
    assert figure.traces[0]["y"] == [1.0] * 4


def test_many_points_are_thinned_but_for_the_last() -> None:
    histories = [History(name, [record("step", n, n, n, loss=1.0) for n in range(count)]) for name, count in COUNTS.items()]
    thinned = {name: part["epoch"].tolist() for name, part in downsampled(recorded(histories, "step", "loss")).groupby("what")}
    assert all(len(epochs) <= 400 and epochs == sorted(epochs) for epochs in thinned.values())
    assert {name: epochs[-1] for name, epochs in thinned.items()} == {name: count - 1 for name, count in COUNTS.items()}
    assert len(thinned["short"]) == COUNTS["short"]


def test_no_time_is_before_the_start_where_a_later_nodes_clock_is_behind(tmp_path: Path) -> None:
    for kind, step, at_ms in (("start", 0, 100_000), ("epoch", 10, 160_000), ("resume", 10, 90_000)):
        add(RunDir(tmp_path), numbers(kind, "student", step, time_ms=at_ms))
    history = read_history("student", read_log(RunDir(tmp_path)), "student", steps=True)
    assert [one["time_ms"] - history.start_ms for one in history.lines] == [0.0, 60e3, 60e3]
