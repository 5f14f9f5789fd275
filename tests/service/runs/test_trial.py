"""What the driver makes of a failure: begin again, a row with its reason, or out of memory."""

import errno
import json
import logging
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.train import ControllerError, WorkerGroupError
from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError
from service.runs.stages.hangs import hang_lines, hang_tags

from service.cluster.resources import Cluster, Node
from service.runs import trial
from service.runs.outcome import Outcome, read_summary
from service.runs.stages import node_wait
from service.runs.stages.assignment import Assignment
from service.runs.stages.node_wait import NodeWait
from service.runs.trial import cause_of, finished, run_to_end
from trainables.config import TrainConfig
from trainables.errors import CheckpointError, DeviceError, DistillError, ExperimentError, StorageError
from trainables.failures import Failure, Kind, WorkersFailedError, read_failure, write_failure
from trainables.rundir import StageDir, write_json
from trainables.stage_result import StageResult, write_stage_result
from trainables.worker import trainer
from trainables.worker.ray_failures import failures_in, ray_failure
from trainables.worker.ray_internals import NCCLHangError


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
        ("hang", "failed", 3),
        ("time_limit", "failed", 1),
        ("worker_died", "failed", 3),
        ("lost_peer", "failed", 3),
    ],
)
def test_only_what_beginning_again_may_fix_is_begun_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind, status: str, tries: int
) -> None:
    begun = []

    def fit(config: TrainConfig, **_: object) -> None:
        begun.append(config)
        write_failure(StageDir(tmp_path).error_of(1), ended(kind, rank=1))
        raise WorkersFailedError([ended("lost_peer", rank=0)])

    monkeypatch.setattr(trainer, "fit", fit)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(node_wait, "living_nodes", lambda: Cluster((Node("only", 8, 0),)))
    config = TrainConfig.model_validate(
        {"model": "mlp_small", "output_dir": str(tmp_path), "data": {"path": "digits"}, "scale": {"max_failures": 2}}
    )
    outcome = run_to_end(Assignment(config, False, 1, tmp_path))
    assert (outcome.status, outcome.failure, len(begun), outcome.restarts) == (status, kind, tries, tries - 1)


@pytest.mark.parametrize(("places", "tries"), [(("step 3", "step 3"), 2), (("step 3", "step 5", "step 3"), 3)])
def test_a_second_hang_at_the_same_place_ends_the_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, places: tuple[str, ...], tries: int
) -> None:
    begun = list[str]()

    def fit(config: TrainConfig, **_: object) -> None:
        begun.append(places[len(begun)])
        write_failure(StageDir(tmp_path).error_of(0), ended("user", rank=0))  # as of a gloo that words a lost peer anew
        hung = Failure("hang", f"no progress for 9 s: rank 1 hangs in {begun[-1]}", rank=1, position=begun[-1])
        raise WorkersFailedError([hung], f"stacks {len(begun)}")

    monkeypatch.setattr(trainer, "fit", fit)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(NodeWait, "refusal", lambda *_: None)
    config = TrainConfig.model_validate({"model": "mlp_small", "output_dir": str(tmp_path), "data": {"path": "digits"}})
    outcome = run_to_end(Assignment(config, False, 1, tmp_path))
    assert (outcome.status, outcome.failure, outcome.restarts, len(begun)) == ("failed", "hang", tries - 1, tries)
    assert outcome.reason == "hung in step 3 again: no progress for 9 s: rank 1 hangs in step 3"
    stage = StageDir(tmp_path)
    written = read_failure(stage.error)
    assert written is not None
    assert (written.kind, written.position) == ("hang", "step 3")
    assert [f"stacks {number}" in stage.stacks.read_text() for number in range(1, tries + 1)] == [True] * tries
    assert [line.partition(": ")[2] for line in hang_lines([("student", stage)])] == [
        f"no progress for 9 s: rank 1 hangs in {place}" for place in places
    ]
    assert hang_tags(stage) == {"hang": "no progress for 9 s: rank 1 hangs in step 3"}
    assert stage.log.read_text().count("hang: going on from the last checkpoint") == tries - 1


def trained(folder: Path, monkeypatch: pytest.MonkeyPatch, *errors: Exception, max_failures: int = 3) -> Outcome:
    """The outcome of a stage whose attempts end in these errors, one after the other."""
    raised = iter(errors)

    def fit(config: TrainConfig, **_: object) -> None:
        raise next(raised)

    monkeypatch.setattr(trainer, "fit", fit)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(NodeWait, "refusal", lambda *_: None)
    tree = {"model": "mlp_small", "data": {"path": "digits"}, "scale": {"max_failures": max_failures}}
    config = TrainConfig.model_validate({**tree, "output_dir": str(folder)})
    outcome = run_to_end(Assignment(config, False, 1, str(folder)))
    assert next(raised, None) is None
    return outcome


def test_hangs_at_unknown_positions_are_not_taken_for_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = [WorkersFailedError([ray_failure(NCCLHangError("a communicator is frozen", {}), 0, "lost_peer")]) for _ in range(3)]
    outcome = trained(tmp_path, monkeypatch, *errors, max_failures=2)
    assert (outcome.failure, outcome.restarts, outcome.reason) == ("hang", 2, "a communicator is frozen")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_disk_that_does_not_take_the_records_of_a_hang_keeps_nobody_from_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    stage = StageDir(tmp_path)
    stage.log.parent.mkdir()
    for path in (stage.hangs, stage.log):
        path.symlink_to("/dev/full")
    hung = Failure("hang", "no progress for 9 s", rank=1, position="step 3")
    with caplog.at_level(logging.WARNING, "raydistill"):
        outcome = trained(tmp_path, monkeypatch, WorkersFailedError([hung]), DistillError("the end"))
    assert outcome.reason == "the end"
    assert "failed cannot be recorded: [Errno 28] No space left" in caplog.text
    assert "hang: going on from the last checkpoint (restart 1 of at most 3) (not in" in caplog.text


def test_a_gpu_that_cannot_be_used_is_begun_again_and_its_kind_is_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def launch() -> None:
        unusable = DeviceError("node a: Ray has a GPU there that torch cannot use")
        raise ControllerError(ray.exceptions.RayTaskError("check_gpu", "", unusable))

    monkeypatch.setattr(ray.train.torch, "TorchTrainer", lambda *_, **__: SimpleNamespace(fit=launch))
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(NodeWait, "refusal", lambda *_: None)
    tree = {"model": "mlp_small", "output_dir": str(tmp_path), "data": {"path": "digits"}, "scale": {"max_failures": 1}}
    outcome = run_to_end(Assignment(TrainConfig.model_validate(tree), False, 1, str(tmp_path)))
    assert (outcome.status, outcome.failure, outcome.restarts) == ("failed", "device", 1)
    assert outcome.reason == "node a: Ray has a GPU there that torch cannot use"


def test_a_full_disk_does_not_hide_why_the_workers_failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(config: TrainConfig) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(trial, "fetch_stage", refuse)
    outcome = trained(tmp_path, monkeypatch, WorkersFailedError([ended("user", rank=1)]))
    assert (outcome.failure, outcome.reason) == ("user", "why")


def test_a_store_that_does_not_answer_does_not_hide_why_the_workers_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(config: TrainConfig) -> None:
        raise StorageError("s3://bucket does not answer")

    monkeypatch.setattr(trial, "fetch_stage", refuse)
    with caplog.at_level(logging.WARNING, "raydistill"):
        outcome = trained(tmp_path, monkeypatch, WorkersFailedError([ended("user", rank=1)]))
    assert (outcome.failure, outcome.reason) == ("user", "why")
    assert "what the workers wrote last of student cannot be read: s3://bucket" in caplog.text
    monkeypatch.setattr(trainer, "fit", lambda *_, **__: None)
    config = TrainConfig.model_validate({"model": "mlp_small", "output_dir": str(tmp_path), "data": {"path": "digits"}})
    assert run_to_end(Assignment(config, False, 1, str(tmp_path))).reason == "s3://bucket does not answer"


def test_a_wait_for_nodes_that_ended_well_does_not_count_for_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes, begun = [Node("0", 8, 0)], 0

    def fit(config: TrainConfig, **_: object) -> None:
        nonlocal begun
        begun += 1
        if begun == 1:  # a node is lost, and replaced inside the minute in which Ray waits
            nodes.clear()
            raise WorkersFailedError([ended("worker_died", rank=0)])
        time.sleep(0.2)  # trained for longer than it may wait, then lost another one
        raise WorkersFailedError([ended("worker_died", rank=0)]) if begun < 4 else DistillError("the end")

    monkeypatch.setattr(trainer, "fit", fit)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(node_wait, "living_nodes", lambda: Cluster(tuple(nodes)))
    tree = {"model": "mlp_small", "output_dir": str(tmp_path), "data": {"path": "digits"}, "scale": {"wait_for_nodes_s": 0.1}}
    outcome = run_to_end(Assignment(TrainConfig.model_validate(tree), False, 1, tmp_path))
    assert (outcome.reason, begun) == ("the end", 4)


def test_a_restart_has_what_is_left_of_the_assignments_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left_s = list[float]()

    def fit(config: TrainConfig, *, limit_s: float, **_: object) -> None:
        left_s.append(limit_s)
        time.sleep(0.1)
        raise WorkersFailedError([ended("worker_died", rank=0)])

    monkeypatch.setattr(trainer, "fit", fit)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(NodeWait, "refusal", lambda *_: None)
    config = TrainConfig.model_validate({"model": "mlp_small", "output_dir": str(tmp_path), "data": {"path": "digits"}})
    run_to_end(Assignment(config, False, 1, tmp_path, limit_s=60.0))
    first, second, *_ = left_s
    assert first == 60.0
    assert 0 < second <= 59.9


def test_the_cause_is_what_a_worker_wrote_unless_it_only_lost_another(tmp_path: Path) -> None:
    stage = StageDir(tmp_path)
    died = WorkersFailedError([ended("lost_peer", rank=0), ended("worker_died", rank=1)])
    assert cause_of(stage, died).rank == 1
    write_failure(stage.error_of(0), ended("lost_peer", rank=0))
    assert cause_of(stage, died).kind == "worker_died"
    write_failure(stage.error_of(2), ended("user", rank=2))
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
    write_json(stage.result, {"metrics": {"steps": 3.0}, "precision": "bf16", "precision_reason": "images of 224 px"})
    outcome = finished(stage)
    assert outcome is not None
    assert (outcome.precision, outcome.precision_reason) == ("bf16", "images of 224 px")


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
