"""What the driver makes of a failure: begin again, a row with its reason, or out of memory."""

import errno
import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.train import ControllerError, WorkerGroupError
from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError

from service.cluster.resources import Cluster, Node
from service.runs.events import event
from service.runs.outcome import Outcome
from service.runs.stages import node_wait
from service.runs.stages.assignment import Assignment
from service.runs.stages.node_wait import NodeWait
from service.runs.trial import begin_stage, cause_of, finished, refused_with, run_to_end
from service.sweeps.trial_functions import has_begun
from tests.run_log import LocalRecorder, events_of, numbers
from trainables.config import TrainConfig
from trainables.errors import CheckpointError, DeviceError, DistillError
from trainables.failures import Failure, Kind, WorkersFailedError
from trainables.rundir import StageDir
from trainables.worker import trainer
from trainables.worker.ray_failures import failures_in, ray_failure
from trainables.worker.ray_internals import NCCLHangError


def ended(kind: Kind, **about: Any) -> Failure:
    return Failure(kind, "why", **about)


def assigned(config: TrainConfig, limit_s: float | None = None) -> Assignment:
    """The stage, its log in its own folder."""
    folder = config.output_dir
    return Assignment(config, False, 1, folder).recorded_by(LocalRecorder(Path(folder)), limit_s)


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
        raise WorkersFailedError([ended("lost_peer", rank=0), ended(kind, rank=1)])

    monkeypatch.setattr(trainer, "fit", fit)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(node_wait, "living_nodes", lambda: Cluster((Node("only", 8, 0),)))
    config = TrainConfig.model_validate(
        {"model": "mlp_small", "output_dir": str(tmp_path), "data": {"path": "digits"}, "scale": {"max_failures": 2}}
    )
    outcome = run_to_end(assigned(config))
    assert (outcome.status, outcome.failure, len(begun), outcome.restarts) == (status, kind, tries, tries - 1)


@pytest.mark.parametrize(("places", "tries"), [(("step 3", "step 3"), 2), (("step 3", "step 5", "step 3"), 3)])
def test_a_second_hang_at_the_same_place_ends_the_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, places: tuple[str, ...], tries: int
) -> None:
    begun = list[str]()

    def fit(config: TrainConfig, **_: object) -> None:
        begun.append(places[len(begun)])
        hung = Failure("hang", f"no progress for 9 s: rank 1 hangs in {begun[-1]}", rank=1, position=begun[-1])
        raise WorkersFailedError([hung, ended("user", rank=0)], f"stacks {len(begun)}")  # gloo may word a lost peer anew

    monkeypatch.setattr(trainer, "fit", fit)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(NodeWait, "refusal", lambda *_: None)
    config = TrainConfig.model_validate({"model": "mlp_small", "output_dir": str(tmp_path), "data": {"path": "digits"}})
    outcome = run_to_end(assigned(config))
    assert (outcome.status, outcome.failure, outcome.restarts, len(begun)) == ("failed", "hang", tries - 1, tries)
    assert outcome.reason == "hung in step 3 again: no progress for 9 s: rank 1 hangs in step 3"
    stage = StageDir(tmp_path)
    assert [f"stacks {number}" in stage.stacks.read_text() for number in range(1, tries + 1)] == [True] * tries
    messages = [hang["message"] for hang in events_of(tmp_path, "hang")]
    assert messages == [f"no progress for 9 s: rank 1 hangs in {place}" for place in places]
    assert [each["failure"]["position"] for each in events_of(tmp_path, "restart")] == list(places[:-1])
    assert stage.log.read_text().count("hang: restarting from the last checkpoint") == tries - 1


@pytest.mark.parametrize("kind", ["worker_died", "hang"])
def test_a_death_that_a_full_disk_does_not_take_down_ends_the_stage_which_can_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Kind
) -> None:
    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fit(config: TrainConfig, **_: object) -> None:
        monkeypatch.setattr(os, "fsync", full)
        raise WorkersFailedError([Failure(kind, "rank 1 is gone")])

    monkeypatch.setattr(trainer, "fit", fit)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(NodeWait, "refusal", lambda *_: None)
    config = TrainConfig.model_validate({"model": "mlp_small", "output_dir": str(tmp_path), "data": {"path": "digits"}})
    outcome = run_to_end(assigned(config))
    assert (outcome.status, outcome.failure, outcome.restarts) == ("failed", "disk", 0)
    assert "rank 1 is gone; then " in outcome.reason
    assert outcome.reason.endswith(f"{tmp_path}/events.jsonl: No space left on device: free space, then run `distill resume`")


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
    outcome = run_to_end(assigned(config))
    assert next(raised, None) is None
    return outcome


def test_hangs_at_unknown_positions_are_not_taken_for_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    errors = [WorkersFailedError([ray_failure(NCCLHangError("a communicator is frozen", {}), 0, "lost_peer")]) for _ in range(3)]
    outcome = trained(tmp_path, monkeypatch, *errors, max_failures=2)
    assert (outcome.failure, outcome.restarts, outcome.reason) == ("hang", 2, "a communicator is frozen")


def test_a_gpu_that_cannot_be_used_is_begun_again_and_its_kind_is_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def launch() -> None:
        unusable = DeviceError("node a: Ray has a GPU there that torch cannot use")
        raise ControllerError(ray.exceptions.RayTaskError("check_gpu", "", unusable))

    monkeypatch.setattr(trainer, "TrainerWithoutDatasets", lambda *_, **__: SimpleNamespace(fit=launch))
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(NodeWait, "refusal", lambda *_: None)
    tree = {"model": "mlp_small", "output_dir": str(tmp_path), "data": {"path": "digits"}, "scale": {"max_failures": 1}}
    outcome = run_to_end(assigned(TrainConfig.model_validate(tree)))
    assert (outcome.status, outcome.failure, outcome.restarts) == ("failed", "device", 1)
    assert outcome.reason == "node a: Ray has a GPU there that torch cannot use"


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
    outcome = run_to_end(assigned(TrainConfig.model_validate(tree)))
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
    run_to_end(assigned(config, limit_s=60.0))
    first, second, *_ = left_s
    assert first == 60.0
    assert 0 < second <= 59.9


def test_one_wait_for_nodes_is_enough_for_all_trials_that_need_as_much_and_have_not_begun(tmp_path: Path) -> None:
    recorder, assignments = LocalRecorder(tmp_path), dict[str, Assignment]()
    for number, num_workers in enumerate((2, 1, 2, 4, 2)):
        tree = {"model": "mlp_small", "output_dir": str(tmp_path / f"trials/{number:03d}/student"), "data": {"path": "digits"}}
        config = TrainConfig.model_validate({**tree, "scale": {"num_workers": num_workers}})
        assignments[f"{number:03d}"] = Assignment(config, False, 1, "").recorded_by(recorder)
    recorder.record([event("stage_begun", "trials/000/student", trial="000", model="mlp_small")])
    recorder.record([event("stage_begun", "trials/002/student", trial="002", model="mlp_small")])
    recorder.record([event("trial_ended", trial="004", outcome={"status": "ok"})])
    waiting = {id: each for id, each in assignments.items() if not has_begun(id, each)}
    gone = Outcome(status="failed", reason="2 workers do not fit", failure="unschedulable")
    refused = refused_with("000", gone, assignments["000"], waiting)
    assert {id: outcome.reason for id, outcome in refused.items()} == {
        "003": "it needs as much as trial 000, and 2 workers do not fit"
    }
    assert refused_with("000", Outcome(status="oom", failure="out_of_memory"), assignments["000"], waiting) == {}


def test_the_cause_is_no_peer_that_was_lost_and_what_the_watch_found_before_all() -> None:
    failures = [ended("lost_peer", rank=0), ended("worker_died", rank=1), ended("user", rank=2), ended("hang", rank=3)]
    for count, rank in ((1, 0), (2, 1), (3, 2), (4, 3)):
        assert cause_of(WorkersFailedError(failures[:count])).rank == rank


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


def test_a_stage_is_finished_by_its_summary_while_its_best_checkpoint_is_there(tmp_path: Path) -> None:
    assignment = assigned(
        TrainConfig.model_validate({"model": "mlp_small", "output_dir": str(tmp_path), "data": {"path": "digits"}})
    )
    assert finished(assignment) is None
    about = {"precision": "bf16", "precision_reason": "images of 224 px"}
    assignment.log.record([event("checkpoint", ".", step=3, names=["best.safetensors"])])
    assignment.log.record([numbers("summary", ".", 3, steps=3.0) | about])
    assert finished(assignment) is None
    expected = Outcome(status="ok", metrics={"steps": 3.0}, **about)
    assert finished(assignment, has_just_run=True) == expected
    StageDir(tmp_path).best.parent.mkdir()
    StageDir(tmp_path).best.touch()
    assert finished(assignment) == expected


def test_a_trial_whose_last_checkpoint_was_removed_begins_its_stage_from_nothing(tmp_path: Path) -> None:
    tree = {"model": "mlp_small", "output_dir": str(tmp_path), "data": {"path": "digits"}}
    assignment = assigned(TrainConfig.model_validate(tree))
    last = StageDir(tmp_path).last
    last.parent.mkdir()
    last.touch()
    assignment.log.record([event("checkpoint", ".", step=3, names=[last.name])])
    begin_stage("000", assignment)
    assert [each["kind"] for each in assignment.events] == ["checkpoint", "stage_begun"]
    last.unlink()
    begin_stage("000", assignment)
    assert [each["kind"] for each in assignment.events] == ["stage_begun"]
