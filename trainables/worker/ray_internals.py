"""What this package uses of Ray that is not public API, and nothing else does.

`tests/trainables/worker/test_ray_internals.py` checks each name with the installed Ray.
"""

from functools import partial
from typing import Any

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
from ray.util.placement_group import placement_group

__all__ = [
    "NCCLHangError",
    "RayTrainError",
    "WorkerGroupCallback",
    "WorkerGroupStartupFailedError",
    "WorkerGroupStartupTimeoutError",
    "WorkerHealthCheckFailedError",
    "abort",
    "is_preempted",
    "name_reservation",
]


def abort(worker_group: Any) -> None:
    """End a worker group and free the resources that it reserved.

    Ray Train forgets a group whose backend fails to start, and with it the placement group.
    """
    worker_group.abort()


def name_reservation(name: str) -> None:
    """On the controller: the next worker group's resources are reserved under a name.

    Ray Train gives them none. Where a controller dies before all workers have started, nobody gives the resources back as long as
    the driver lives, and its next workers wait for them.
    """
    worker_group_module.placement_group = partial(placement_group, name=name)


def is_preempted() -> bool:
    """In a worker: whether Ray has announced the end of a node of its job.

    `ray.train.get_preemption_info` says the same, and makes every rank wait for all others through an actor.
    """
    return get_train_context().preemption_context.preemption_info is not None
