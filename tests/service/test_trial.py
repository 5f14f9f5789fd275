"""What an error of Ray's or a worker's own means for the trial: begin again, a row with its reason, or out of memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from service.trial import diagnose, finished, known
from trainables.rundir import StageDir, write_json


def stage_with(folder: Path, kind: str, message: str, *, user: bool = False) -> StageDir:
    stage = StageDir(folder)
    write_json(stage.error, {"type": kind, "message": message, "rank": 1, "user": user})
    return stage


@pytest.mark.parametrize(
    ("kind", "message", "user", "again"),
    [
        ("TrainingError", "the loss is not finite at step 3", True, True),
        ("ValueError", "Expected more than 1 value per channel when training", False, True),
        ("RuntimeError", "[gloo/transport/tcp/pair.cc] Connection closed by peer [127.0.0.1]:9", False, False),
        ("DistBackendError", "NCCL error: remote process exited", False, False),
        ("RuntimeError", "CUDA error: uncorrectable ECC error encountered", False, False),
    ],
)
def test_only_what_would_come_again_ends_a_trial_at_once(
    tmp_path: Path, kind: str, message: str, user: bool, again: bool
) -> None:
    stage = stage_with(tmp_path, kind, message, user=user)
    assert known(stage, RuntimeError("training failed")) is again
    assert diagnose(stage, RuntimeError("training failed"), 0).status == "failed"
    assert message in diagnose(stage, RuntimeError("training failed"), 0).reason


def test_a_death_without_a_word_is_no_known_cause(tmp_path: Path) -> None:
    error = RuntimeError(
        "Training failed due to worker errors:\n[Rank 0]\nThe actor died unexpectedly before finishing this task."
    )
    assert not known(StageDir(tmp_path), error)
    assert diagnose(StageDir(tmp_path), error, 2).reason.startswith("a worker died: The actor died unexpectedly")
    assert diagnose(StageDir(tmp_path), error, 2).restarts == 2


def test_memory_that_runs_out_is_its_own_status(tmp_path: Path) -> None:
    assert (
        diagnose(stage_with(tmp_path, "oom", "CUDA out of memory. Tried to allocate 2 GiB"), RuntimeError(""), 0).status == "oom"
    )
    killed = RuntimeError("Task was killed due to the node running low on memory.")
    assert diagnose(StageDir(tmp_path / "b"), killed, 0).status == "oom"


def test_a_stage_is_finished_by_its_result_file_alone(tmp_path: Path) -> None:
    stage = StageDir(tmp_path)
    assert finished(stage) is None
    write_json(stage.result, {"metrics": {"steps": 3.0}})
    outcome = finished(stage, 1)
    assert outcome is not None
    assert (outcome.status, outcome.metrics, outcome.restarts) == ("ok", {"steps": 3.0}, 1)
