"""The only imports of Ray's private API by this package.

`tests/trainables/worker/test_ray_internals.py` checks each name with the installed Ray.
"""

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
    "WorkerGroupCallback",
    "WorkerGroupStartupFailedError",
    "WorkerGroupStartupTimeoutError",
    "WorkerHealthCheckFailedError",
    "is_preempted",
    "worker_group_module",
]


def is_preempted() -> bool:
    """In a worker, return whether Ray has announced the end of one of the job's nodes.

    `ray.train.get_preemption_info` does the same, but makes all ranks wait for each other through an actor.
    """
    return get_train_context().preemption_context.preemption_info is not None
