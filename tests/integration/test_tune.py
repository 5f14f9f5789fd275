"""What becomes of trials whose function raises or dies in the hands of a real Ray Tune, and of those that a session adds."""

import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray

from service.cluster.resources import Cluster, Node
from service.config.experiment import load
from service.runs.outcome import Outcome, read_outcome
from service.runs.plan import Plan
from service.runs.stages.assignment import Assignment
from service.sweeps.trials import plan_trials
from service.sweeps.tune import SessionEnding, tune_trials
from tests.integration.conftest import kill, title, wait_until
from trainables.rundir import RunDir, append_line

pytestmark = pytest.mark.integration

EPOCH = {
    "kind": "epoch",
    "stage": "student",
    "epoch": 1.0,
    "step": 10,
    "time_ms": 1_700_000_000_000,
    "metrics": {"epoch/training_epoch": 1.0, "val/top1_pct": 60.0},
}


@pytest.fixture
def local_ray() -> Iterator[None]:
    ray.init(address="local", num_cpus=8, log_to_driver=False, include_dashboard=False)
    yield
    ray.shutdown()


@pytest.mark.timeout(600)
def test_a_trial_that_raises_or_dies_has_failed_whatever_epochs_it_has_and_later_sessions_run_others(
    tmp_path: Path, local_ray: None
) -> None:
    asha = ["sweep.policy=asha", "sweep.metric=top1_pct", "sweep.space.optim.lr=[0.1, 0.2, 0.3]", "optim.epochs=1"]
    resolved = load("digits", [*asha, "teacher=null", "tracking.enabled=false", "data.loader_workers=1"])
    run_dir, cluster = RunDir(tmp_path), Cluster((Node("only", 8, 0),))
    assignments = dict[str, Assignment]()
    for trial in plan_trials(resolved):
        assert trial.resolved is not None
        assignments[trial.id] = Plan.on(trial.resolved.experiment, cluster).assign("student", run_dir.trial(trial.id), {})
        append_line(run_dir.trial(trial.id).stage("student").metrics, EPOCH)
    run_dir.trial("000").stage("student").sessions.mkdir()  # in place of a disk that is full
    config = resolved.experiment.sweep

    def outcome_of(trial: str) -> Outcome:
        return read_outcome(run_dir.trial(trial).result)

    def run(*trials: str) -> None:
        tune_trials(config, {trial: assignments[trial] for trial in trials}, run_dir, 2, SessionEnding())

    first = threading.Thread(target=run, args=("000", "001"), daemon=True)
    first.start()
    wait_until(run_dir.trial("000").result.exists, "end of the trial that raises")
    wait_until(run_dir.trial("001").stage("student").sessions.exists, "begin of the one that is to die")
    kill([process for process in psutil.Process().children(recursive=True) if "ray::ImplicitFunc" in title(process)])
    first.join()
    raised, died = outcome_of("000"), outcome_of("001")
    assert (raised.status, died.status) == ("failed", "failed")
    assert raised.reason.startswith("IsADirectoryError: ")
    assert died.reason.startswith("the process that led its workers died: ")
    for outcome in (raised, died):
        assert len(outcome.reason.splitlines()) == 1
        assert Path(outcome.reason.rpartition("see ")[2]).is_file()
    run("002")
    assert outcome_of("002").status == "ok"
