"""What sweeps use of Ray Tune that is not public API, and nothing else does."""

from typing import Any

from ray.air.execution._internal import RayActorManager
from ray.exceptions import OutOfMemoryError, RayActorError
from ray.tune.execution import tune_controller


class OutOfMemoryDeath(RayActorError):  # type: ignore[misc]
    """The death of a trial's process that Ray's memory monitor killed."""


class ActorManager(RayActorManager):  # type: ignore[misc]
    """Ray Tune's own knows deaths of processes as `RayActorError` alone: the whole sweep ends with a process out of memory."""

    def _actor_start_failed(self, tracked_actor: Any, exception: Exception) -> None:
        super()._actor_start_failed(tracked_actor, _death(exception))

    def _actor_task_failed(self, tracked_actor_task: Any, exception: Exception) -> None:
        super()._actor_task_failed(tracked_actor_task, _death(exception))


def _death(exception: Exception) -> Exception:
    return OutOfMemoryDeath(error_msg=str(exception)) if isinstance(exception, OutOfMemoryError) else exception


def survive_out_of_memory() -> None:
    """Let Ray Tune end a trial, and not the sweep, where the memory monitor kills the trial's process."""
    tune_controller.RayActorManager = ActorManager
