"""What a sweep's trials leave in the spool."""

import json
from pathlib import Path

import pytest

from service.config.experiment import load
from service.report import end_of_run
from service.runs.display import Display
from service.runs.outcome import Outcome
from service.runs.result import RunResult
from service.runs.session import Session
from service.sweeps.trial_records import TrialRecords
from service.sweeps.trials import plan_trials
from service.tracking import Tracker, default_uri
from service.tracking.spool import Spool
from trainables.rundir import RunDir


@pytest.mark.parametrize(
    ("changes", "begins_with", "ends_with"),
    [
        (["sweep.metric=top1_pct"], "top1_pct", ["top1_pct", "images_per_s", "epoch_s"]),
        (["sweep.metric=epoch_s", "sweep.steps=3"], "", ["epoch_s", "images_per_s", "top1_pct"]),
        (["sweep.policy=guided", "sweep.metric=pareto"], "", ["images_per_s", "epoch_s", "top1_pct"]),
    ],
)
def test_the_first_metric_of_a_trial_is_that_by_which_trials_are_compared(
    changes: list[str], begins_with: str, ends_with: list[str], tmp_path: Path
) -> None:
    resolved = load("digits", changes)
    run_dir, trial = RunDir(tmp_path / "run"), plan_trials(resolved)[0]
    tracker = Tracker(run_dir, default_uri(tmp_path), "digits")
    result = RunResult(kind="sweep", name="digits", status="running", runs_root=str(tmp_path))
    with Display() as display:
        records = TrialRecords(Session(resolved, run_dir, display, end_of_run, tracker, result))
        records.begin(trial)
        trial.outcome = Outcome(status="ok", metrics={"epoch_s": 1.0, "top1_pct": 50.0, "images_per_s": 9.0})
        records.end(trial)
    events = [json.loads(line) for line in Spool(run_dir).events.read_text().splitlines()]
    (begun,), (ended,) = ([event for event in events if event["op"] == op] for op in ("run", "metrics"))
    assert begun["first_metric"] == begins_with
    assert list(ended["metrics"]) == ends_with


def test_each_measurement_of_a_point_is_followed_once_however_often_the_point_is_measured_again(tmp_path: Path) -> None:
    resolved = load("digits", ["sweep.policy=guided"])
    run_dir, trial = RunDir(tmp_path / "run"), plan_trials(resolved)[0]
    tracker = Tracker(run_dir, default_uri(tmp_path), "digits")
    result = RunResult(kind="sweep", name="digits", status="running", runs_root=str(tmp_path))
    with Display() as display:
        records = TrialRecords(Session(resolved, run_dir, display, end_of_run, tracker, result))
        records.begin(trial)
        for count in (1, 2, 3):
            measurements = [Outcome(status="ok")] * count if count > 1 else []
            trial.outcome = Outcome(status="ok", measurements=measurements)
            records.end(trial)
    events = [json.loads(line) for line in Spool(run_dir).events.read_text().splitlines()]
    followed = [event["path"] for event in events if event["op"] == "follow"]
    assert followed == [f"trials/{trial.id}/{stage}/metrics.jsonl" for stage in ("student", "student-2", "student-3")]
