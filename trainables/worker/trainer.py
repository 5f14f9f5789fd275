"""The driver's entry into this package: `fit` runs one of the entry points on a Ray Train worker group."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import ray
import ray.train

from trainables.config import EvaluateConfig, FillConfig, TrainConfig
from trainables.data.loader.malloc import REUSE_FREED_MEMORY
from trainables.errors import ClusterError, DeviceError, DistillError
from trainables.failures import EndedError, WorkersFailedError
from trainables.worker import entry_points
from trainables.worker.hangs.hang_watch import HangWatch
from trainables.worker.process_group import ProcessGroup
from trainables.worker.ray_failures import failures_in
from trainables.worker.ray_internals import TrainerWithoutDatasets, WorkerGroupStartupFailedError, WorkerGroupStartupTimeoutError
from trainables.worker.recorder import RunRecorder
from trainables.worker.reservation import NamedReservation, release, worker_resources

CPU_MALLOC = {"MALLOC_ARENA_MAX": "1", **REUSE_FREED_MEMORY}
"""glibc malloc settings for CPU workers: freed tensors are reused instead of returned to the kernel.

There is one arena because Ray Train runs the loop in a thread, which would get its own.
"""

GPU_ALLOC = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
"""Allocator settings for GPU workers: segments grow, so that batches of many sizes do not fragment memory.

https://docs.pytorch.org/docs/stable/notes/cuda.html#optimizing-memory-usage-with-pytorch-alloc-conf
"""
_LEGACY_GPU_ALLOC = "PYTORCH_CUDA_ALLOC_CONF"
"""The variable's older name, which torch still reads."""
GPU_NCCL = {"TORCH_DIST_USE_NCCL2": "0"}
"""Selects torch's older NCCL backend. The new one of torch 2.15 makes backward wait for each bucket of a communication hook,
raises bare RuntimeErrors and records its collectives elsewhere (torch/distributed/distributed_c10d.py, ProcessGroupNCCL2).
"""


class ClusterFullError(Exception):
    """Ray Train found no free resources for the workers within `RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S`, 60 s by default."""

    def __init__(self) -> None:
        super().__init__("the cluster has no free resources for the workers: other jobs are using them")


@dataclass(frozen=True)
class ReusableWorkers:
    """A worker group that starts once and carries out several runs, one after the other.

    `coordinator` is the handle of the actor that chooses the runs. Its `next_config(group_id, result) -> dict | None` takes the
    current run's result and returns the next run's `TrainConfig` as plain data, or None if there is none. With `stops_early`,
    its `should_stop(group_id, steps_s) -> bool` decides whether the current run may end.
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
    """Train one stage (with `reused`, several), fill a cache, compute class means or evaluate on `scale.num_workers` workers.
    Blocks until all workers have ended.

    Each worker reserves a CPU for each compute thread and loader worker, and one GPU. A stage may run for at most `limit_s`.
    `recorder` writes the run's log, see `RunRecorder.begin_attempt`.

    Raises:
        WorkersFailedError: a worker raised or died.
        ClusterFullError: the cluster had no free resources for the workers within the start timeout.
        ClusterError: the workers cannot be started, and retrying would not help.
    """
    resources = worker_resources(config.scale, loader_workers, use_gpu=use_gpu)
    settings = {"config": config.model_dump(mode="json"), "recorder": recorder, "reused": reused}
    has_service = isinstance(config, TrainConfig) and bool(config.teacher_actors)
    trainer = TrainerWithoutDatasets(
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
            # By default Ray Train waits for free resources silently and forever, even after a node's death, and restarts by
            # itself after a preemption, which we would not notice.
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
            release(f"{name}-workers")  # still reserved if the controller died while the workers started
            if isinstance(config, TrainConfig) and config.next_num_workers is not None:
                release(name)


def runtime_env(use_gpu: bool) -> dict[str, Any]:
    """Return the workers' runtime environment: `CPU_MALLOC`, or `GPU_ALLOC` and `GPU_NCCL`, without variables already set."""
    already_set = set(os.environ)
    if _LEGACY_GPU_ALLOC in already_set:
        already_set |= GPU_ALLOC.keys()
    variables = GPU_ALLOC | GPU_NCCL if use_gpu else CPU_MALLOC
    return {"env_vars": {name: value for name, value in variables.items() if name not in already_set}}


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
    """Raise the error for a failure of Ray Train's controller; see `fit`."""
    failure = error.controller_failure
    if isinstance(failure, WorkerGroupStartupTimeoutError):
        raise ClusterFullError from error
    cause = failure.cause if isinstance(failure, ray.exceptions.RayTaskError) else failure
    if isinstance(cause, DistillError) and not isinstance(cause, DeviceError):
        raise cause from error
    # A worker died, hung, could not continue or could not use its GPU, before its training began or while Ray launched it.
    if isinstance(failure, ray.exceptions.RayError | WorkerGroupStartupFailedError | EndedError):
        raise WorkersFailedError(failures_in(error)) from error
    raise ClusterError(f"Ray Train's controller failed: {str(error).splitlines()[-1]}") from error
