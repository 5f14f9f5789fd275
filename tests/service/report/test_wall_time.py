"""Where a run's wall time went, from what its stages have recorded."""

from typing import Any

import pytest

from service.report.timeline import parts, wall_time, wall_time_of_run
from service.runs.outcome import Outcome
from tests.service.report.runs import shown, typed


def plain(seconds: float, **changed: Any) -> dict[str, Any]:
    metrics = {
        "train_s": 60.0,
        "eval_s": 10.0,
        "checkpoint_s": 4.0,
        "other_s": 2.0,
        "wall_s": 76.0,
    }
    return {"seconds": seconds, "start_s": 12.0, "end_s": 1.0, "metrics": metrics, **changed}


def entry(seconds: float) -> Outcome:
    return Outcome(status="ok", **plain(seconds))


def test_parts_are_the_drivers_clock() -> None:
    undisturbed = parts(entry(89.0))
    assert undisturbed == {
        "start": 12.0,
        "training": 60.0,
        "evaluation": 10.0,
        "checkpoints": 4.0,
        "other": 2.0,
        "end": 1.0,
        "interruptions": 0.0,
    }
    assert parts(entry(104.0))["interruptions"] == pytest.approx(15.0)
    assert parts(entry(30.0))["interruptions"] == 0.0  # a resumed stage: its clock knows more than this driver
    assert parts(Outcome(status="ok", metrics={"steps": 3.0}, seconds=9.0)) == {}


def test_the_figure_says_what_lies_outside_the_stages() -> None:
    stages = [{"stage": name, "model": "resnet8", "status": "ok", **plain(89.0)} for name in ("teacher", "student")]
    figure = shown(wall_time_of_run(typed({"kind": "train", "seconds": 190.0, "stages": stages})))
    assert "The run took 190 s, including 12 s outside its stages" in figure.caption
    assert [trace["name"] for trace in figure.traces] == ["start", "training", "evaluation", "checkpoints", "other", "end"]
    assert list(figure.numbers.rows[0]) == ["teacher", "12.00", "60.00", "10.00", "4.00", "2.00", "1.00", "0.00", "89.00"]
    assert wall_time_of_run(typed({"kind": "train"})) is None
    for untrue in ({"seconds": 25.0}, {"seconds": 190.0, "status": "running"}):  # a killed session is missing; still going on
        assert "The run took" not in shown(wall_time_of_run(typed({"kind": "train", "stages": stages, **untrue}))).caption


def test_trials_without_a_clock_on_record_are_left_out() -> None:
    figure = shown(wall_time({"trial 000": entry(89.0), "trial 001": Outcome(status="ok")}))
    assert [row[0] for row in figure.numbers.rows] == ["trial 000"]
    assert wall_time({}) is None
