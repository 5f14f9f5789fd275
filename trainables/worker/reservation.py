"""Resources of workers that are reserved under a name, so that the driver can give back what others have left."""

import contextlib
from typing import Any

import ray
from ray.util.placement_group import get_placement_group, remove_placement_group

from trainables.worker.ray_internals import WorkerGroupCallback, name_reservation


class NamedReservation(WorkerGroupCallback):  # type: ignore[misc]
    """Has Ray Train reserve a worker group's resources under a name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def before_worker_group_start(self, worker_group_context: Any) -> None:
        """Called by Ray Train on the controller."""
        name_reservation(self._name)


def release(name: str) -> None:
    """On the driver: give back what is reserved under this name, if anything is; processes that run there are ended."""
    # ValueError: nothing is; of other errors the driver hears where it uses Ray next
    with contextlib.suppress(ValueError, ray.exceptions.RayError):
        remove_placement_group(get_placement_group(name))
