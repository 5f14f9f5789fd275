"""What is recorded of a trial that leaves no outcome of its own, as Ray Tune ends it."""

import threading
from pathlib import Path

import pytest
import ray
from ray.exceptions import ActorDiedError, RayTaskError
from ray.train._internal.storage import StorageContext
from ray.tune.error import TuneError
from ray.tune.experiment import Trial

from service.runs.events import event
from service.runs.outcome import Outcome
from service.runs.run_log import read_log
from service.runs.stages.assignment import Assignment
from service.runs.stored import stored_runs
from service.sweeps import trial_outcomes
from service.sweeps.trial_outcomes import TrialOutcomeCallback, WorkerGroupOutcomeCallback
from service.sweeps.tune import SessionEnding
from tests.run_log import LocalRecorder, numbers
from tests.s3 import S3
from tests.trainables.jobs import config
from trainables.rundir import RunDir

URI = "s3://bucket/runs/sweep"
DIED = ActorDiedError()


class TrialIn(Trial):  # type: ignore[misc]
    """Tune's trial, whose folder without this is one of a Ray that runs."""

    folder: Path
    local_path = path = property(lambda self: str(self.folder))


def trial_in(folder: Path, error: Exception | None = None, **reported: object) -> Trial:
    """Tune's trial `000`, with an error or with what it reported last."""
    trial = TrialIn("trial", config={"trial": "000", "group": "a"}, stub=True)
    trial.folder = folder
    if error is not None:
        trial.handle_error(error)
    trial.update_last_result({"trial_id": trial.trial_id, **reported})
    return trial


def outcomes_of(run_dir: RunDir, session_ending: SessionEnding | None = None) -> TrialOutcomeCallback:
    stage = config(run_dir.trial("000").stage("student").root, teacher=None)
    assignment = Assignment(stage, False, 1, "").recorded_by(LocalRecorder(run_dir.root))
    return TrialOutcomeCallback(run_dir, {"000": assignment}, session_ending or SessionEnding())


def outcome_in(run_dir: RunDir) -> Outcome | None:
    """How the log says that the trial ended."""
    return read_log(run_dir).fold.outcome_of("000")


def status_in(run_dir: RunDir) -> str | None:
    outcome = outcome_in(run_dir)
    return outcome and outcome.status


def complete(callback: TrialOutcomeCallback, run_dir: RunDir, **reported: object) -> Outcome:
    """What is on record of a trial once Tune calls it complete."""
    trial = trial_in(run_dir.root, None, **reported)
    callback.on_trial_complete(1, [trial], trial)
    outcome = outcome_in(run_dir)
    assert outcome is not None
    return outcome


def test_a_stopped_trial_has_the_numbers_of_its_epochs(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    callback = outcomes_of(run_dir)
    for epoch in (1, 2):
        metrics = {"epoch/train_s": 2.0, "val/top1_pct": 30.0 * epoch}
        callback._assignments["000"].log.record([numbers("epoch", "trials/000/student", 10 * epoch, epoch, **metrics)])
    outcome = complete(callback, run_dir, epoch=2.0, step=20, top1_pct=60.0, pid=7)
    assert (outcome.status, outcome.reason) == ("stopped", "stopped by asha after epoch 2")
    assert outcome.metrics == {"train_s": 4.0, "steps": 20.0, "top1_pct": 60.0}


def test_a_trial_whose_function_ended_was_not_stopped(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    trial = trial_in(tmp_path, epoch=1.0, step=10, ended=True)
    outcomes_of(run_dir).on_trial_complete(1, [trial], trial)
    assert outcome_in(run_dir) is None


def test_a_trial_that_reached_its_end_as_it_was_stopped_stays_complete(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    callback = outcomes_of(run_dir)
    epoch = numbers("epoch", "trials/000/student", 10, 1)
    callback._assignments["000"].log.record([epoch, event("trial_ended", trial="000", outcome={"status": "ok"})])
    assert complete(callback, run_dir, epoch=1.0, step=10).status == "ok"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (DIED, "the trial's process died: The actor died unexpectedly before finishing this task.; see "),
        (TuneError("Traceback:\n  File …\nKeyError: 'epoch'\n"), "Ray Tune ended the trial: KeyError: 'epoch'; see "),
        (RayTaskError("run_trial", "Traceback …", ValueError("what it raised")), "ValueError: what it raised; see "),
    ],
)
def test_a_trial_that_tune_ended_with_an_error_has_failed_and_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, reason: str
) -> None:
    monkeypatch.setattr(trial_outcomes, "SESSION_END_GRACE_S", 0.0)
    run_dir, trial = RunDir(tmp_path), trial_in(tmp_path, error)
    outcomes_of(run_dir).on_trial_error(1, [trial], trial)
    outcome = outcome_in(run_dir)
    assert outcome is not None
    assert outcome.status == "failed"
    assert outcome.reason.startswith(reason)


def test_what_a_trials_function_raised_is_recorded_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_outcomes, "SESSION_END_GRACE_S", 1e6)
    run_dir, trial = RunDir(tmp_path), trial_in(tmp_path, RayTaskError("run_trial", "Traceback …", ValueError("no")))
    outcomes_of(run_dir).on_trial_error(1, [trial], trial)
    assert status_in(run_dir) == "failed"


def test_a_trial_whose_process_the_end_of_the_session_killed_is_left_to_the_next_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial_outcomes, "SESSION_END_GRACE_S", 60.0)
    run_dir, trial, session_ending = RunDir(tmp_path), trial_in(tmp_path, DIED), SessionEnding()
    threading.Timer(0.1, session_ending.set).start()  # the main thread notices a moment later than Tune's
    outcomes_of(run_dir, session_ending=session_ending).on_trial_error(1, [trial], trial)
    assert outcome_in(run_dir) is None


def test_the_reason_of_a_trial_in_the_store_names_the_file_by_its_uri(
    s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYDISTILL_COPIES", str(tmp_path / "copies"))
    run_dir = RunDir(stored_runs.run_folder(URI))
    storage = StorageContext(stored_runs.ray_storage(run_dir), "tune-1", trial_dir_name="000")
    trial = trial_in(tmp_path, RayTaskError("run_trial", "Traceback …", ValueError("no")))
    monkeypatch.setattr(TrialIn, "path", storage.trial_fs_path)
    outcomes_of(run_dir).on_trial_error(1, [trial], trial)
    outcome = outcome_in(run_dir)
    assert outcome is not None
    assert outcome.reason == "ValueError: no; see s3://bucket/runs/.ray/sweep/tune-1/000/error.txt"


def test_ray_tune_can_pickle_the_callbacks(tmp_path: Path) -> None:
    ray.cloudpickle.dumps(
        [
            TrialOutcomeCallback(RunDir(tmp_path), {}, SessionEnding()),
            WorkerGroupOutcomeCallback(RunDir(tmp_path), None, SessionEnding()),
        ]
    )


def test_a_group_of_workers_that_the_end_of_the_session_killed_has_not_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial_outcomes, "SESSION_END_GRACE_S", 0.0)
    trial, session_ending, recorded = trial_in(tmp_path, DIED), SessionEnding(), list[Outcome]()
    callback = WorkerGroupOutcomeCallback(RunDir(tmp_path), None, session_ending)
    monkeypatch.setattr(callback, "record", lambda _, outcome: recorded.append(outcome))
    session_ending.set()
    callback.on_trial_error(1, [trial], trial)
    assert recorded == []
    session_ending.clear()
    callback.on_trial_error(1, [trial], trial)
    assert [outcome.status for outcome in recorded] == ["failed"]
