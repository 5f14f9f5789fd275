"""The only imports of Ray's private API by this package.

`tests/trainables/worker/test_ray_internals.py` checks each name with the installed Ray.
"""

from typing import Any

from ray.train.torch import TorchTrainer
from ray.train.v2._internal.callbacks.datasets import DatasetsCallback
from ray.train.v2._internal.exceptions import (
    RayTrainError,
    WorkerGroupStartupFailedError,
    WorkerGroupStartupTimeoutError,
    WorkerHealthCheckFailedError,
)
from ray.train.v2._internal.execution.callback import WorkerGroupCallback
from ray.train.v2._internal.execution.context import get_train_context
from ray.train.v2._internal.execution.worker_group import worker_group as worker_group_module
from ray.train.v2.api.exceptions import NCCLHangError

__all__ = [
    "NCCLHangError",
    "RayTrainError",
    "TrainerWithoutDatasets",
    "WorkerGroupCallback",
    "WorkerGroupStartupFailedError",
    "WorkerGroupStartupTimeoutError",
    "WorkerHealthCheckFailedError",
    "is_preempted",
    "worker_group_module",
]


class TrainerWithoutDatasets(TorchTrainer):  # type: ignore[misc]
    """Starts no actor for Ray Data's sets, of which there are none: its start takes a second from that of each worker group."""

    def _create_default_callbacks(self) -> list[Any]:
        return [callback for callback in super()._create_default_callbacks() if not isinstance(callback, DatasetsCallback)]


def is_preempted() -> bool:
    """In a worker, return whether Ray has announced the end of one of the job's nodes.

    `ray.train.get_preemption_info` does the same, but makes all ranks wait for each other through an actor.
    """
    return get_train_context().preemption_context.preemption_info is not None
