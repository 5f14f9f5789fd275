"""The driver's call into this package: `fit` runs one of the entry points on a Ray Train worker group."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import ray
import ray.train
import ray.train.torch

from trainables.config import EvaluateConfig, FillConfig, TrainConfig
from trainables.data.loader.malloc import REUSE_FREED_MEMORY
from trainables.errors import ClusterError, DeviceError, DistillError
from trainables.failures import EndedError, WorkersFailedError
from trainables.worker import entry_points
from trainables.worker.hangs.hang_watch import HangWatch
from trainables.worker.process_group import ProcessGroup
from trainables.worker.ray_failures import failures_in
from trainables.worker.ray_internals import WorkerGroupStartupFailedError, WorkerGroupStartupTimeoutError
from trainables.worker.recorder import RunRecorder
from trainables.worker.reservation import NamedReservation, release, worker_resources

CPU_MALLOC = {"MALLOC_ARENA_MAX": "1", **REUSE_FREED_MEMORY}
"""glibc's allocator for workers that compute on a CPU: freed tensors are reused instead of returned to the kernel.

One arena: Ray Train runs the loop in a thread, which would have another than the main one.
"""

GPU_ALLOC = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
"""torch's allocator for workers that compute on a GPU: its segments grow, so that batches of many sizes leave no gaps behind.

https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-alloc-conf
"""
_ALSO_GPU_ALLOC = "PYTORCH_CUDA_ALLOC_CONF"
"""The variable's older name, which torch reads too."""
GPU_NCCL = {"TORCH_DIST_USE_NCCL2": "0"}
"""torch's older NCCL backend. That of torch 2.15 makes backward wait for each bucket of a communication hook, raises bare
RuntimeErrors and records its collectives elsewhere (torch/distributed/distributed_c10d.py, ProcessGroupNCCL2).
"""


class ClusterFullError(Exception):
    """Ray Train found no free resources for the workers within `RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S`, 60 s by default."""

    def __init__(self) -> None:
        super().__init__("the cluster has no room for the workers: other jobs use its resources")


@dataclass(frozen=True)
class ReusableWorkers:
    """A worker group that carries out several runs, one after the other, and so starts only once.

    `coordinator` is the handle of an actor that chooses the runs. It has `next_config(group_id, result) -> dict | None`: takes
    the current run's result and returns the next run's `TrainConfig` as plain data, or None where these workers have no more to
    do. Where it `stops_early`, its `should_stop(group_id, steps_s) -> bool` says whether the current run may end.
    """

    coordinator: Any
    group_id: str
    stops_early: bool


def fit(
    config: TrainConfig | EvaluateConfig,
    *,
    use_gpu: bool,
    loader_workers: int,
    storage: str,
    name: str,
    recorder: RunRecorder,
    callbacks: list[Any] | None = None,
    reused: ReusableWorkers | None = None,
    limit_s: float | None = None,
) -> None:
    """Train one stage (with `reused` others after it), fill a cache, compute class means, or evaluate, with `scale.num_workers`
    workers. Blocks until all workers have ended.

    Each worker reserves what it uses: its compute threads and its loader workers as CPUs, and one GPU. `limit_s`: how long a
    stage may take on its workers; `recorder`: of the run's log, see `RunRecorder.begin_attempt`.

    Raises:
        WorkersFailedError: a worker raised or died.
        ClusterFullError: the cluster had no free resources for the workers for a minute.
        ClusterError: the workers could not be started at all, which trying again would not change.
    """
    resources = worker_resources(config.scale, loader_workers, use_gpu=use_gpu)
    settings = {"config": config.model_dump(mode="json"), "recorder": recorder, "reused": reused}
    has_service = isinstance(config, TrainConfig) and bool(config.teacher_actors)
    trainer = ray.train.torch.TorchTrainer(
        _entry_point(config, reused),
        train_loop_config=settings,
        torch_config=ProcessGroup(backend="nccl" if use_gpu else "gloo", timeout_s=config.scale.collective_timeout_s),
        scaling_config=ray.train.ScalingConfig(
            num_workers=config.scale.num_workers, use_gpu=use_gpu, resources_per_worker=resources
        ),
        run_config=ray.train.RunConfig(
            storage_path=storage,
            name=name,
            callbacks=[
                *(callbacks or []),
                HangWatch(config.scale.hang_after_s, limit_s, has_service=has_service),
                NamedReservation(f"{name}-workers"),
            ],
            worker_runtime_env=runtime_env(use_gpu),
            # By default Ray Train waits for free resources for ever, silently, also where a node's death made that hopeless, and
            # begins again by itself after an announced end of a node, where we would not know of it.
            failure_config=ray.train.FailureConfig(controller_failure_limit=0, max_preemption_failures=0),
        ),
    )
    try:
        trainer.fit()
    except ray.train.ControllerError as error:
        _raise_controller_failure(error)
    except (ray.train.TrainingFailedError, ray.exceptions.RayError) as error:
        failures = getattr(error, "worker_failures", {}).values()
        stacks = next((failure.stacks for failure in failures if isinstance(failure, EndedError) and failure.stacks), "")
        raise WorkersFailedError(failures_in(error), stacks) from error
    finally:
        if ray.is_initialized():
            release(f"{name}-workers")  # left where the controller died while the workers started
            if isinstance(config, TrainConfig) and config.next_num_workers is not None:
                release(name)


def runtime_env(use_gpu: bool) -> dict[str, Any]:
    """The runtime environment of what computes: `CPU_MALLOC`, or `GPU_ALLOC` and `GPU_NCCL`, but for what is set."""
    own = set(os.environ)
    if _ALSO_GPU_ALLOC in own:
        own |= GPU_ALLOC.keys()
    variables = GPU_ALLOC | GPU_NCCL if use_gpu else CPU_MALLOC
    return {"env_vars": {name: value for name, value in variables.items() if name not in own}}


def _entry_point(config: TrainConfig | EvaluateConfig, reused: ReusableWorkers | None) -> Callable[[dict[str, Any]], None]:
    if reused is not None:
        return entry_points.points_loop_per_worker
    if isinstance(config, FillConfig):
        return entry_points.fill_loop_per_worker
    if isinstance(config, TrainConfig) and config.finetuned is not None and config.finetuned.head is not None:
        return entry_points.class_means_loop_per_worker
    if isinstance(config, TrainConfig):
        return entry_points.train_loop_per_worker
    return entry_points.evaluate_loop_per_worker


def _raise_controller_failure(error: ray.train.ControllerError) -> NoReturn:
    """Raise what a failure of Ray Train's controller means; see `fit`."""
    failure = error.controller_failure
    if isinstance(failure, WorkerGroupStartupTimeoutError):
        raise ClusterFullError from error
    cause = failure.cause if isinstance(failure, ray.exceptions.RayTaskError) else failure
    if isinstance(cause, DistillError) and not isinstance(cause, DeviceError):
        raise cause from error
    # A worker died or hangs, could not continue, or cannot use its GPU, before its training began or while Ray launched it.
    if isinstance(failure, ray.exceptions.RayError | WorkerGroupStartupFailedError | EndedError):
        raise WorkersFailedError(failures_in(error)) from error
    raise ClusterError(f"Ray Train's controller failed: {str(error).splitlines()[-1]}") from error
