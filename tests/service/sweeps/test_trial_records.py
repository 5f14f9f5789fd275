"""What a sweep's trials leave in the spool."""

import json
from pathlib import Path

import pytest
from mlflow import MlflowClient

from service.config.experiment import load
from service.runs.display import Display
from service.runs.outcome import Outcome
from service.sweeps.trial_records import TrialRecords
from service.sweeps.trials import plan_trials, rows_of
from service.tracking import Tracker, default_uri, sync
from service.tracking.spool import Spool
from tests.run_log import session_of
from trainables.rundir import RunDir


@pytest.mark.parametrize(
    ("changes", "begins_with", "ends_with"),
    [
        (["sweep.metric=top1_pct"], "top1_pct", ["top1_pct", "images_per_s", "epoch_s"]),
        (["sweep.metric=epoch_s", "sweep.steps=3"], "", ["epoch_s", "images_per_s", "top1_pct"]),
        (["sweep.metric=phase/data_p95_ms", "sweep.steps=3"], "", ["phase/data_p95_ms", "images_per_s", "top1_pct", "epoch_s"]),
        (["sweep.policy=guided", "sweep.metric=pareto"], "", ["images_per_s", "top1_pct", "epoch_s"]),
    ],
)
def test_the_first_metric_of_a_trial_is_that_by_which_trials_are_compared(
    changes: list[str], begins_with: str, ends_with: list[str], tmp_path: Path
) -> None:
    resolved = load("digits", changes)
    run_dir, trial = RunDir(tmp_path / "run"), plan_trials(resolved)[0]
    tracker = Tracker(run_dir, default_uri(tmp_path), "digits")
    with Display() as display:
        records = TrialRecords(session_of(resolved, run_dir, display, tracker))
        records.begin(trial)
        trial.outcome = Outcome(
            status="ok", metrics={"phase/data_p95_ms": 2.0, "epoch_s": 1.0, "top1_pct": 50.0, "images_per_s": 9.0}
        )
        records.end(trial)
    events = [json.loads(line) for line in Spool(run_dir).events.read_text().splitlines()]
    (begun,), (ended,) = ([event for event in events if event["op"] == op] for op in ("run", "metrics"))
    assert begun["first_metric"] == begins_with
    assert list(ended["metrics"]) == ends_with


def test_a_resumed_sweep_that_another_trial_wins_leaves_one_winner_and_names_it_by_its_point(tmp_path: Path) -> None:
    resolved = load(
        "digits", ["sweep.steps=3", "sweep.space={optim.lr: [0.1], scale.num_workers: [1], data.global_batch_size: [8, 9]}"]
    )
    run_dir, trials = RunDir(tmp_path / "run"), plan_trials(resolved)
    tracker = Tracker(run_dir, default_uri(tmp_path), "digits")
    first, second = rows_of(trials, resolved, timing=True)
    with Display() as display:
        records = TrialRecords(session_of(resolved, run_dir, display, tracker))
        for trial in trials:
            records.begin(trial)
        records.mark_winner(first.id, ["best: trial 000", "by far"])
        records.mark_winner(second.id, ["best: trial 001"])
    assert sync(run_dir).num_pending == 0
    client = MlflowClient(default_uri(tmp_path))
    (experiment,) = client.search_experiments(filter_string="name = 'digits'")
    runs = {run.info.run_name: run.data.tags for run in client.search_runs([experiment.experiment_id])}
    marks = {name: (tags["raydistill.winner"], tags["mlflow.note.content"]) for name, tags in runs.items()}
    assert marks == {
        "000 lr=0.1 workers=1 batch=8": ("false", ""),
        "001 lr=0.1 workers=1 batch=9": ("true", "best: trial 001"),
    }
