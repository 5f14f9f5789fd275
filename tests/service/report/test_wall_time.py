"""Where a run's wall time went, from what its stages have recorded."""

from typing import Any

import pytest

from service.report.wall_time import of_trials, parts, wall_time_figure, wall_time_sentence
from service.runs.outcome import Outcome
from tests.service.report.runs import typed, typed_row


def plain(seconds: float, **changed: Any) -> dict[str, Any]:
    metrics = {
        "train_s": 60.0,
        "eval_s": 10.0,
        "checkpoint_s": 4.0,
        "other_s": 2.0,
        "wall_s": 76.0,
        "epoch_s": 5.5,
        "epoch_wall_s": 7.6,
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
    assert parts(Outcome(status="ok", metrics={"wall_s": 3.0}, seconds=9.0)) == {}


def test_the_figure_says_what_an_epoch_takes_and_what_lies_outside_the_stages() -> None:
    both = [("teacher", entry(89.0)), ("student", entry(89.0))]
    shown = wall_time_figure(both, typed({"seconds": 190.0}))
    assert shown is not None
    assert "By the clock an epoch takes 7.6 s, its steps at the steady speed 5.5 s." in shown.caption
    assert "The run took 190 s; 12 s of them lie outside its stages" in shown.caption
    assert [trace["name"] for trace in shown.traces] == ["start", "training", "evaluation", "checkpoints", "other", "end"]
    assert list(shown.numbers.rows[0]) == ["teacher", "12.00", "60.00", "10.00", "4.00", "2.00", "1.00", "0.00", "89.00"]
    assert wall_time_figure([("student", Outcome(status="ok"))], typed({})) is None
    for untrue in (
        {"seconds": 25.0},
        {"seconds": 190.0, "status": "running"},
    ):  # a session that was killed is missing; still going on
        incomplete = wall_time_figure(both, typed(untrue))
        assert incomplete is not None
        assert "The run took" not in incomplete.caption
    assert wall_time_sentence({"epoch_s": 3.0}) == ""


def test_of_trials_the_caption_is_about_the_best_one_and_counts_those_that_are_not_shown() -> None:
    rows = [typed_row({**plain(89.0), "id": f"{number:03d}", "status": "ok"}) for number in range(8)]
    rows[0].metrics.update(epoch_wall_s=9.9)
    for row in rows:
        row.metrics.update(images_per_s=1.0)
    drawn = of_trials(rows[:6], [*rows, typed_row({"id": "008", "status": "oom", "metrics": {}})])
    assert drawn is not None
    assert "an epoch takes 9.9 s" in drawn.caption
    assert drawn.caption.endswith("Not shown: 1 oom, 2 without one of the highest speeds of 9 trials.")
    for row in rows:
        row.metrics.update(top1_pct=90.0)
    accurate = of_trials(rows[:6], rows)
    assert accurate is not None
    assert accurate.caption.endswith("Not shown: 2 without one of the highest accuracies of 8 trials.")
    assert of_trials([], rows) is None
