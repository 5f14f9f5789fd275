"""All uses of Ray Tune's private API."""

from collections.abc import Callable
from typing import Any

from ray.air.execution._internal import RayActorManager
from ray.exceptions import OutOfMemoryError, RayActorError
from ray.tune import Trainable, with_resources
from ray.tune.execution import tune_controller
from ray.tune.trainable import wrap_function


class ActorOutOfMemoryError(RayActorError):  # type: ignore[misc]
    """Ray's memory monitor killed a trial's process."""


class ActorManager(RayActorManager):  # type: ignore[misc]
    """Turns an `OutOfMemoryError` into a `RayActorError`, which ends only the trial.

    Ray Tune's own manager raises `RuntimeError` instead, which ends the sweep.
    """

    def _actor_start_failed(self, tracked_actor: Any, exception: Exception) -> None:
        super()._actor_start_failed(tracked_actor, _death(exception))

    def _actor_task_failed(self, tracked_actor_task: Any, exception: Exception) -> None:
        super()._actor_task_failed(tracked_actor_task, _death(exception))


def _death(exception: Exception) -> Exception:
    return ActorOutOfMemoryError(error_msg=str(exception)) if isinstance(exception, OutOfMemoryError) else exception


def trial_class(function: Callable[[dict[str, Any]], None], resources: dict[str, float]) -> type[Trainable]:
    """Wrap a trial's function and its resources for Ray Tune, with readable names on Ray's dashboard.

    Tune would show `ImplicitFunc` and `func`.
    """
    names = {"_name": "trial", "__repr__": lambda trial: str(trial.trial_name)}
    return type("Trial", (wrap_function(with_resources(function, resources)),), names)


def install_actor_manager() -> None:
    """Make Ray Tune use `ActorManager` in this process."""
    tune_controller.RayActorManager = ActorManager
