"""What is recorded of a trial that leaves no outcome of its own, as Ray Tune ends it."""

from pathlib import Path

import pytest
import ray
from ray.exceptions import ActorDiedError, RayTaskError
from ray.train._internal.storage import StorageContext
from ray.tune.error import TuneError
from ray.tune.experiment import Trial

from service.runs import tune_errors
from service.runs.outcome import Outcome, read_outcome, write_outcome
from service.runs.stages.assignment import Assignment
from service.runs.stored import stored_runs
from service.search.searcher import WorkerGroupOutcomeCallback
from service.sweeps.trial_outcomes import TrialOutcomeCallback
from service.sweeps.tune import SessionEnding
from tests.s3 import S3
from tests.trainables.jobs import config
from trainables.config import RunStore
from trainables.object_store.run_copy import RunCopy
from trainables.object_store.store import ObjectStore
from trainables.rundir import RunDir, append_line

URI = "s3://bucket/runs/sweep"
DIED = ActorDiedError()
EPOCH = {"kind": "epoch", "epoch": 1.0, "step": 10, "metrics": {"epoch/train_s": 2.0, "val/top1_pct": 50.0}}


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


def outcomes_of(
    run_dir: RunDir, store: RunStore | None = None, session_ending: SessionEnding | None = None
) -> TrialOutcomeCallback:
    stage = config(run_dir.trial("000").stage("student").root, teacher=None).model_copy(update={"run_store": store})
    return TrialOutcomeCallback(run_dir, {"000": Assignment(stage, False, 1, "")}, session_ending or SessionEnding())


def complete(callback: TrialOutcomeCallback, run_dir: RunDir, **reported: object) -> Outcome:
    """What a trial's `result.json` has, once Tune calls it complete."""
    trial = trial_in(run_dir.root, None, **reported)
    callback.on_trial_complete(1, [trial], trial)
    return read_outcome(run_dir.trial("000").result)


def test_a_stopped_trial_has_the_records_that_its_workers_put_in_the_store(s3: S3, tmp_path: Path) -> None:
    lines, run_dir = RunDir(tmp_path / "node").trial("000").stage("student").metrics, RunDir(tmp_path / "driver")
    for record in (EPOCH, {**EPOCH, "epoch": 2.0, "step": 20}):
        append_line(lines, record)
    ObjectStore(URI).put(str(lines.relative_to(tmp_path / "node")), lines)
    append_line(run_dir.trial("000").stage("student").metrics, EPOCH)  # what the driver had of them
    store = RunStore(uri=URI, folder=str(run_dir.root))
    outcome = complete(outcomes_of(run_dir, store), run_dir, epoch=2.0, step=20, top1_pct=50.0)
    assert (outcome.status, outcome.reason) == ("stopped", "stopped by asha after epoch 2")
    assert outcome.metrics == {"train_s": 4.0, "steps": 20.0, "top1_pct": 50.0}


def test_a_stopped_trial_without_records_here_has_what_it_reported(
    s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stored_runs, "RunCopy", lambda uri, folder: RunCopy(uri, folder, 0.1))
    s3.refuse(403, 10**6)
    run_dir, store = RunDir(tmp_path / "driver"), RunStore(uri=URI, folder=str(tmp_path / "driver"))
    outcome = complete(outcomes_of(run_dir, store), run_dir, epoch=3.0, step=30, top1_pct=60.0, pid=7)
    assert (outcome.status, outcome.reason) == ("stopped", "stopped by asha after epoch 3")
    assert outcome.metrics == {"steps": 30.0, "top1_pct": 60.0}
    assert "trial 000 was stopped, and its last records cannot be read: " in caplog.text


def test_a_trial_whose_function_ended_was_not_stopped_though_its_result_is_not_seen_here_yet(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    append_line(run_dir.trial("000").stage("student").metrics, EPOCH)
    trial = trial_in(tmp_path, epoch=1.0, step=10, ended=True)
    outcomes_of(run_dir).on_trial_complete(1, [trial], trial)
    assert not run_dir.trial("000").result.exists()


def test_a_trial_that_reached_its_end_as_it_was_stopped_stays_complete(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    write_outcome(run_dir.trial("000").result, Outcome(status="ok"))
    assert complete(outcomes_of(run_dir), run_dir, epoch=1.0, step=10).status == "ok"


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
    monkeypatch.setattr(tune_errors, "SESSION_END_GRACE_S", 0.0)
    run_dir, trial = RunDir(tmp_path), trial_in(tmp_path, error)
    callback = outcomes_of(run_dir)
    callback.on_trial_error(1, [trial], trial)
    callback.on_step_end(1, [trial])
    outcome = read_outcome(run_dir.trial("000").result)
    assert outcome.status == "failed"
    assert outcome.reason.startswith(reason)


def test_what_a_trials_function_raised_is_recorded_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune_errors, "SESSION_END_GRACE_S", 1e6)
    run_dir, trial = RunDir(tmp_path), trial_in(tmp_path, RayTaskError("run_trial", "Traceback …", ValueError("no")))
    outcomes_of(run_dir).on_trial_error(1, [trial], trial)
    assert read_outcome(run_dir.trial("000").result).status == "failed"


def test_a_trial_whose_process_the_end_of_the_session_killed_is_left_to_the_next_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune_errors, "SESSION_END_GRACE_S", 60.0)
    run_dir, trial, session_ending = RunDir(tmp_path), trial_in(tmp_path, DIED), SessionEnding()
    callback = outcomes_of(run_dir, session_ending=session_ending)
    callback.on_trial_error(1, [trial], trial)  # does not wait: Tune's loop goes on
    callback.on_step_end(1, [trial])
    session_ending.set()  # the main thread notices a moment later than Tune's
    callback.on_experiment_end([trial])
    assert not run_dir.trial("000").result.exists()


def test_a_death_that_is_due_as_the_session_ends_is_left_to_the_next_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune_errors, "SESSION_END_GRACE_S", 0.0)
    run_dir, trial, session_ending = RunDir(tmp_path), trial_in(tmp_path, DIED), SessionEnding()
    callback = outcomes_of(run_dir, session_ending=session_ending)
    callback.on_trial_error(1, [trial], trial)
    session_ending.set()
    callback.on_step_end(1, [trial])
    callback.on_experiment_end([trial])
    assert not run_dir.trial("000").result.exists()


def test_an_outcome_that_cannot_be_recorded_is_tried_again_and_replaces_no_error_of_tunes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tune_errors, "SESSION_END_GRACE_S", 0.0)
    run_dir, trial = RunDir(tmp_path), trial_in(tmp_path, DIED)
    callback = outcomes_of(run_dir)
    callback.on_trial_error(1, [trial], trial)
    folder = run_dir.trial("000").root
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.write_text("in the way")
    with pytest.raises(OSError, match="trials/000"):
        callback.on_step_end(1, [trial])
    callback.on_experiment_end([trial])
    assert "cannot be recorded" in caplog.text
    folder.unlink()
    callback.on_step_end(2, [trial])
    assert read_outcome(run_dir.trial("000").result).status == "failed"


def test_a_death_just_before_tune_ends_is_recorded_before_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune_errors, "SESSION_END_GRACE_S", 0.05)
    run_dir, trial = RunDir(tmp_path), trial_in(tmp_path, DIED)
    callback = outcomes_of(run_dir)
    callback.on_trial_error(1, [trial], trial)
    assert not run_dir.trial("000").result.exists()
    callback.on_experiment_end([trial])
    assert read_outcome(run_dir.trial("000").result).status == "failed"


def test_the_reason_of_a_trial_in_the_store_names_the_file_by_its_uri(
    s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAYDISTILL_COPIES", str(tmp_path / "copies"))
    run_dir = RunDir(stored_runs.run_folder(URI))
    storage = StorageContext(stored_runs.ray_storage(run_dir), "tune-1", trial_dir_name="000")
    trial = trial_in(tmp_path, RayTaskError("run_trial", "Traceback …", ValueError("no")))
    monkeypatch.setattr(TrialIn, "path", storage.trial_fs_path)
    outcomes_of(run_dir).on_trial_error(1, [trial], trial)
    reason = read_outcome(run_dir.trial("000").result).reason
    assert reason == "ValueError: no; see s3://bucket/runs/.ray/sweep/tune-1/000/error.txt"


def test_ray_tune_can_pickle_the_callbacks(tmp_path: Path) -> None:
    ray.cloudpickle.dumps([outcomes_of(RunDir(tmp_path)), WorkerGroupOutcomeCallback(RunDir(tmp_path), None, SessionEnding())])


def test_a_group_of_workers_that_the_end_of_the_session_killed_has_not_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune_errors, "SESSION_END_GRACE_S", 0.0)
    trial, session_ending, recorded = trial_in(tmp_path, DIED), SessionEnding(), list[Outcome]()
    callback = WorkerGroupOutcomeCallback(RunDir(tmp_path), None, session_ending)
    monkeypatch.setattr(callback, "record", lambda _, outcome: recorded.append(outcome))
    session_ending.set()
    callback.on_trial_error(1, [trial], trial)
    callback.on_step_end(1, [trial])
    callback.on_experiment_end([trial])
    assert recorded == []
    session_ending.clear()
    callback.on_step_end(2, [trial])
    assert [outcome.status for outcome in recorded] == ["failed"]
