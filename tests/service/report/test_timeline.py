"""Figures over time from what stages write while they run."""

from pathlib import Path
from typing import Any

from service.report.charts import PALETTE
from service.report.records import read_history
from service.report.timeline import accuracy, downsampled, hardware, losses, recorded
from service.runs.events import Event
from service.runs.run_log import read_log
from tests.run_log import add, numbers
from tests.service.report.runs import Shown, shown
from trainables.rundir import RunDir

COUNTS = {"long": 10_001, "just": 401, "short": 400}


def record(kind: str, step: int, epoch: float, at_s: float, **metrics: float) -> dict[str, Any]:
    return {"kind": kind, "step": step, "epoch": epoch, "time_ms": 1e12 + 1e3 * at_s, "metrics": metrics}


def trained(label: str, epochs_s: list[float], **more: float) -> tuple[str, list[Event]]:
    lines, at = [record("start", 0, 0, 0.0, steps_per_epoch=10)], 0.0
    for epoch, seconds in enumerate(epochs_s, start=1):
        at += seconds + 2.0
        clock = {"epoch/train_s": seconds, "epoch/eval_s": 2.0}
        lines.append(record("epoch", 10 * epoch, epoch, at, **{**clock, "val/top1_pct": 10.0 * epoch, **more}))
    return label, lines


def test_accuracy_is_over_wall_time_in_a_unit_that_suits() -> None:
    figure = shown(accuracy(dict([trained("trial 000", [58.0] * 30), trained("trial 001", [28.0] * 30)]), ["trial 001"]))
    assert figure.layout["xaxis"]["title"]["text"] == "min"
    chosen = figure.traces[-1]
    assert (chosen["name"], chosen["x"][-1], chosen["y"][0]) == ("trial 001", 15.0, 10.0)
    assert accuracy({"trial 000": [record("start", 0, 0, 0.0)]}, []) is None


def test_the_chosen_trials_are_in_the_first_colors_and_the_numbers_are_of_all() -> None:
    histories = dict(trained(f"trial {number:03d}", [10.0] * 4) for number in range(100))
    chosen = [f"trial {number:03d}" for number in (8, 2, 5)]
    figure = shown(accuracy(histories, chosen))
    assert [trace["name"] for trace in figure.traces] == chosen
    assert [trace["line"]["color"] for trace in figure.traces] == list(PALETTE[:3])
    assert len(figure.numbers.rows) == 100
    assert figure.caption.endswith(" Of 100: the best and the most accurate.")


def test_hardware_has_a_line_a_gpu_and_no_legend_of_many() -> None:
    def run(gpus: int) -> Shown:
        temperatures = {f"epoch/node{gpu // 8}/gpu{gpu % 8}/temperature_c": 60.0 + gpu for gpu in range(gpus)}
        (figure,) = hardware(dict([trained("student", [10.0] * 3, **temperatures)]))
        return shown(figure)

    few, many = run(2), run(16)
    assert [trace["name"] for trace in few.traces] == ["node0/gpu0", "node0/gpu1"]
    assert len(many.traces) == 16
    assert not any(trace["showlegend"] for trace in many.traces)
    assert "From 60 to 75 °C" in many.caption
    assert many.numbers.rows[-1] == ("node1/gpu7", "75.0", "75.0", "75.0", "–")
    assert hardware({}) == []


def test_a_loss_that_is_not_finite_is_left_out() -> None:
    lines = [record("step", n, n / 10, n, **{"train/loss": 1.0 if n else float("nan")}) for n in range(5)]
    assert shown(losses({"student": lines})).traces[0]["y"] == [1.0] * 4


def test_many_points_are_downsampled_but_for_the_last() -> None:
    histories = {name: [record("step", n, n, n, loss=1.0) for n in range(count)] for name, count in COUNTS.items()}
    drawn = {name: part["epoch"].tolist() for name, part in downsampled(recorded(histories, "step", "loss")).groupby("what")}
    assert all(len(epochs) <= 400 and epochs == sorted(epochs) for epochs in drawn.values())
    assert {name: epochs[-1] for name, epochs in drawn.items()} == {name: count - 1 for name, count in COUNTS.items()}
    assert len(drawn["short"]) == COUNTS["short"]


def test_no_time_is_before_the_start_where_a_later_nodes_clock_is_behind(tmp_path: Path) -> None:
    for kind, step, at_ms in (("start", 0, 100_000), ("epoch", 10, 160_000), ("resume", 10, 90_000)):
        add(RunDir(tmp_path), numbers(kind, "student", step, time_ms=at_ms))
    history = read_history(read_log(RunDir(tmp_path)), "student", "start", "epoch", "resume")
    assert [one["time_ms"] - history[0]["time_ms"] for one in history] == [0.0, 60e3, 60e3]
