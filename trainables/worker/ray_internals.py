"""What this package uses of Ray that is not public API, and nothing else does.

`tests/trainables/worker/test_ray_internals.py` checks each name with the installed Ray.
"""

from typing import Any

from ray.train.v2._internal.exceptions import (
    RayTrainError,
    WorkerGroupStartupFailedError,
    WorkerGroupStartupTimeoutError,
    WorkerHealthCheckFailedError,
)
from ray.train.v2._internal.execution.callback import WorkerGroupCallback
from ray.train.v2.api.exceptions import NCCLHangError

__all__ = [
    "NCCLHangError",
    "RayTrainError",
    "WorkerGroupCallback",
    "WorkerGroupStartupFailedError",
    "WorkerGroupStartupTimeoutError",
    "WorkerHealthCheckFailedError",
    "abort",
]


def abort(worker_group: Any) -> None:
    """End a worker group and free the resources that it reserved.

    Ray Train forgets a group whose backend fails to start, and with it the placement group.
    """
    worker_group.abort()
