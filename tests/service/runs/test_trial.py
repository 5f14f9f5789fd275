"""What the driver makes of a failure: begin again, a row with its reason, or out of memory."""

import json
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.train import ControllerError, WorkerGroupError
from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError

from service.cluster.resources import Cluster, Node
from service.runs import node_wait
from service.runs.assignment import Assignment
from service.runs.outcome import Outcome, read_summary
from service.runs.trial import cause_of, finished, run_to_end
from trainables.config import TrainConfig
from trainables.errors import CheckpointError, ExperimentError
from trainables.failures import Failure, Kind, WorkersFailedError, write_failure
from trainables.rundir import StageDir, write_json
from trainables.stage_result import StageResult, write_stage_result
from trainables.worker import trainer
from trainables.worker.ray_failures import failures_in


def ended(kind: Kind, **about: Any) -> Failure:
    return Failure(kind, "why", **about)


@pytest.mark.parametrize(
    ("kind", "status", "tries"),
    [
        ("user", "failed", 1),
        ("disk", "failed", 1),
        ("out_of_memory", "oom", 1),
        ("node_out_of_memory", "oom", 1),
        ("device", "failed", 3),
        ("worker_died", "failed", 3),
        ("lost_peer", "failed", 3),
    ],
)
def test_only_what_beginning_again_may_mend_is_begun_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind, status: str, tries: int
) -> None:
    begun = []

    def fit(config: TrainConfig, **_: object) -> None:
        begun.append(config)
        write_failure(StageDir(tmp_path).error, ended(kind, rank=1))
        raise WorkersFailedError([ended("lost_peer", rank=0)])

    monkeypatch.setattr(trainer, "fit", fit)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(node_wait, "living_nodes", lambda: Cluster((Node("only", 8, 0),)))
    config = TrainConfig.model_validate(
        {"model": "mlp_small", "output_dir": str(tmp_path), "data": {"path": "digits"}, "scale": {"max_failures": 2}}
    )
    outcome = run_to_end(Assignment(config, False, 1, tmp_path))
    assert (outcome.status, outcome.failure, len(begun), outcome.restarts) == (status, kind, tries, tries - 1)


def test_the_cause_is_what_a_worker_wrote_unless_it_only_lost_another(tmp_path: Path) -> None:
    stage = StageDir(tmp_path)
    died = WorkersFailedError([ended("lost_peer", rank=0), ended("worker_died", rank=1)])
    assert cause_of(stage, died).rank == 1
    write_failure(stage.error, ended("lost_peer", rank=0))
    assert cause_of(stage, died).kind == "worker_died"
    write_failure(stage.error, ended("user", rank=2))
    assert cause_of(stage, died).rank == 2


def test_rays_own_errors_are_read_by_their_types() -> None:
    def failed(error: Exception, rank: int = 0) -> Failure:
        return failures_in(WorkerGroupError("…", {rank: error}))[0]

    death = ray.exceptions.ActorDiedError()
    assert failed(WorkerHealthCheckFailedError("A worker health check failed.", death), 1) == Failure(
        "worker_died", "The actor died unexpectedly before finishing this task.", "ActorDiedError", 1
    )
    killed = ray.exceptions.OutOfMemoryError("Task was killed due to the node running low on memory.")
    assert failed(WorkerHealthCheckFailedError("…", killed)).kind == "node_out_of_memory"
    assert failed(KeyError("peer_logits"), 3) == Failure("user", "'peer_logits'", "KeyError", 3)
    # of a disk that was too full for the worker's own note
    assert failed(CheckpointError("cannot write checkpoint")) == Failure("user", "cannot write checkpoint", None, 0)
    assert failed(OSError(28, "No space left on device", "/runs/x")).kind == "disk"
    assert failures_in(ControllerError(death))[0].kind == "worker_died"
    assert failures_in(death)[0].kind == "worker_died"


def test_a_stage_is_finished_by_its_result_file_alone(tmp_path: Path) -> None:
    stage = StageDir(tmp_path)
    assert finished(stage) is None
    write_json(stage.result, {"metrics": {"steps": 3.0}})
    outcome = finished(stage, 1)
    assert outcome == Outcome(status="ok", metrics={"steps": 3.0}, restarts=1)


def test_a_stages_result_has_the_version_of_its_format_and_a_newer_one_is_refused(tmp_path: Path) -> None:
    stage = StageDir(tmp_path)
    result = StageResult(stage="student", model="resnet8", decoder="pil", metrics={"steps": 3.0}, steps_s=[0.5])
    write_stage_result(stage, result)
    assert read_summary(stage) == result
    written = json.loads(stage.result.read_text())
    assert written["version"] == 1
    write_json(stage.result, {**written, "version": 2})
    with pytest.raises(ExperimentError, match=r"stage\.json has format 2 of a newer version, and this one reads up to 1: use"):
        read_summary(stage)
