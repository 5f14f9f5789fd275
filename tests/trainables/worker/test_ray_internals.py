"""Each name of Ray that is not public API, with the installed Ray: what `trainables.worker` relies on is so."""

import dataclasses
import inspect
import pickle
from types import SimpleNamespace

import pytest
import ray.exceptions
import ray.train
import ray.train.torch
from ray.train.v2._internal.execution.context import TrainContext
from ray.train.v2._internal.execution.preemption import PreemptionContext
from ray.train.v2._internal.execution.worker_group.worker import ActorMetadata, Worker
from ray.train.v2._internal.execution.worker_group.worker_group import WorkerGroup

from trainables.failures import EndedError, Failure
from trainables.worker import ray_internals
from trainables.worker.hangs.hang_watch import HangWatch
from trainables.worker.process_group import ProcessGroup, ProcessGroupBackend
from trainables.worker.ray_failures import failures_in, ray_failure
from trainables.worker.ray_internals import (
    NCCLHangError,
    RayTrainError,
    TrainerWithoutDatasets,
    WorkerGroupCallback,
    WorkerGroupStartupFailedError,
    WorkerGroupStartupTimeoutError,
    WorkerHealthCheckFailedError,
    is_preempted,
)


@pytest.mark.parametrize("kind", [WorkerGroupStartupFailedError, WorkerGroupStartupTimeoutError, WorkerHealthCheckFailedError])
def test_the_exceptions_of_ray_train_have_one_base(kind: type[Exception]) -> None:
    assert issubclass(kind, RayTrainError)


def test_a_failed_health_check_has_the_workers_own_failure_also_after_its_way_to_the_driver() -> None:
    error = WorkerHealthCheckFailedError("rank 1", ray.exceptions.ActorDiedError())
    for arrived in (error, pickle.loads(pickle.dumps(error))):
        assert isinstance(arrived.health_check_failure, ray.exceptions.ActorDiedError)
        failure = ray_failure(arrived, 1, "worker_died")
        assert (failure.kind, failure.type) == ("worker_died", "ActorDiedError")


def test_an_announced_end_is_known_to_the_worker_before_it_and_to_the_driver_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    info = ray.train.PreemptionInfo(deadline_ms=None, preempted_node_to_ranks={"node": [1]})
    assert {field.name for field in dataclasses.fields(TrainContext)} >= {"preemption_context"}
    for known, expected in ((None, False), (info, True)):
        context = SimpleNamespace(preemption_context=PreemptionContext(known))
        monkeypatch.setattr(ray_internals, "get_train_context", lambda context=context: context)
        assert is_preempted() is expected
    died = ray.exceptions.RayActorError(preempted=True)
    for error in (died, WorkerHealthCheckFailedError("rank 1", died), ray.train.PreemptionError(info)):
        assert ray_failure(error, 1, "worker_died").kind == "preempted"


def test_a_trainer_starts_no_actor_for_ray_datas_sets_and_keeps_all_other_callbacks() -> None:
    run = ray.train.RunConfig(storage_path="/", name="run")
    theirs, ours = (
        [type(callback).__name__ for callback in trainer(print, run_config=run)._create_default_callbacks()]
        for trainer in (ray.train.torch.TorchTrainer, TrainerWithoutDatasets)
    )
    assert [name for name in theirs if name not in ours] == ["DatasetsCallback"]


def test_a_controller_error_has_its_failure_and_a_worker_group_error_those_of_its_workers() -> None:
    late = ray.train.ControllerError(WorkerGroupStartupTimeoutError(num_workers=3))
    assert isinstance(late.controller_failure, WorkerGroupStartupTimeoutError)
    assert [failure.type for failure in failures_in(late)] == ["WorkerGroupStartupTimeoutError"]
    failed = ray.train.WorkerGroupError("two failed", {0: ValueError("a"), 2: KeyError("b")})
    assert [(failure.rank, failure.type) for failure in failures_in(failed)] == [(0, "ValueError"), (2, "KeyError")]


def test_a_worker_group_has_the_methods_by_which_the_process_group_is_made() -> None:
    parameters = {
        name: list(inspect.signature(getattr(WorkerGroup, name)).parameters)
        for name in ("execute_async", "execute_single_async", "abort", "__len__")
    }
    assert parameters["execute_async"][:2] == ["self", "fn"]
    assert parameters["execute_single_async"][:3] == ["self", "rank", "fn"]
    assert parameters["abort"] == parameters["__len__"] == ["self"]


def test_a_callback_on_the_worker_group_is_called_with_what_the_watch_reads() -> None:
    assert "placement_group(" in inspect.getsource(WorkerGroup._create_placement_group), "what `NamedReservation` replaces"
    hooks = {
        "before_worker_group_start": ["self", "worker_group_context"],
        "after_worker_group_training_start": ["self", "worker_group"],
        "after_worker_group_poll_status": ["self", "worker_group_status"],
        "before_worker_group_shutdown": ["self", "worker_group"],
        "before_worker_group_abort": ["self", "worker_group_context"],
    }
    for name, parameters in hooks.items():
        assert list(inspect.signature(getattr(WorkerGroupCallback, name)).parameters) == parameters
        assert list(inspect.signature(getattr(HangWatch, name)).parameters) == parameters
    assert list(inspect.signature(WorkerGroup.get_workers).parameters) == ["self"]
    assert list(inspect.signature(Worker.execute_async).parameters)[:2] == ["self", "fn"]
    assert {"metadata", "distributed_context"} <= Worker.__dataclass_fields__.keys()
    assert {"pid", "node_id", "node_ip"} <= ActorMetadata.__dataclass_fields__.keys()
    assert isinstance(ActorMetadata.gpu_ids, property)
    assert pickle.loads(pickle.dumps(HangWatch("auto", 3.0))).after_worker_group_poll_status(None) is None


def test_what_the_watch_raises_reaches_the_driver_with_its_failure_and_so_does_a_hang_that_ray_finds() -> None:
    ended = EndedError(Failure("hang", "no progress", rank=1, position="data of step 3"), "stacks")
    found = pickle.loads(pickle.dumps(ray.train.WorkerGroupError("no progress", {1: ended})))
    assert failures_in(found) == [ended.failure]
    assert found.worker_failures[1].stacks == "stacks"
    nccl = failures_in(NCCLHangError("communicator 3 is frozen", {}))[0]
    assert (nccl.kind, nccl.message) == ("hang", "communicator 3 is frozen")


def test_the_process_group_is_rays_torch_backend_with_another_start() -> None:
    assert ProcessGroup().backend_cls is ProcessGroupBackend
    theirs = ray.train.torch.TorchConfig().backend_cls
    assert issubclass(ProcessGroupBackend, theirs)
    assert list(inspect.signature(ProcessGroupBackend.on_start).parameters) == list(inspect.signature(theirs.on_start).parameters)
    assert ProcessGroup().timeout_s > 0
