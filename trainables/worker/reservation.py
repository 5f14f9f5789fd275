"""Reserve worker resources under a name, so that the driver can release what a dead controller left behind."""

import contextlib
from functools import partial
from typing import Any

import ray
from ray.util.placement_group import get_placement_group, placement_group, remove_placement_group

from trainables.config import ScaleConfig
from trainables.worker.ray_internals import WorkerGroupCallback, worker_group_module


def worker_resources(scale: ScaleConfig, loader_workers: int, *, use_gpu: bool) -> dict[str, float]:
    """Return one worker's resources: a CPU for each compute thread and loader worker, and one GPU."""
    return {"CPU": float(scale.cpus_per_worker + loader_workers), **({"GPU": 1.0} if use_gpu else {})}


class NamedReservation(WorkerGroupCallback):  # type: ignore[misc]
    """Makes Ray Train reserve a worker group's resources under a name, which it does not do by itself.

    If a controller dies before all workers have started, the resources stay reserved while the driver lives, and its next
    workers wait for them.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def before_worker_group_start(self, worker_group_context: Any) -> None:
        """Called by Ray Train on the controller."""
        worker_group_module.placement_group = partial(placement_group, name=self._name)


def release(name: str) -> None:
    """On the driver, release the resources reserved under `name`, if any; processes that use them are killed."""
    # ValueError: nothing is reserved. Other errors will show at the driver's next Ray call.
    with contextlib.suppress(ValueError, ray.exceptions.RayError):
        remove_placement_group(get_placement_group(name))
