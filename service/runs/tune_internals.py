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
    """Ray Tune's manager raises `RuntimeError`, which ends the sweep, for an `OutOfMemoryError`.

    Here it becomes a `RayActorError`, which ends the trial only.
    """

    def _actor_start_failed(self, tracked_actor: Any, exception: Exception) -> None:
        super()._actor_start_failed(tracked_actor, _death(exception))

    def _actor_task_failed(self, tracked_actor_task: Any, exception: Exception) -> None:
        super()._actor_task_failed(tracked_actor_task, _death(exception))


def _death(exception: Exception) -> Exception:
    return ActorOutOfMemoryError(error_msg=str(exception)) if isinstance(exception, OutOfMemoryError) else exception


def trial_class(function: Callable[[dict[str, Any]], None], resources: dict[str, float]) -> type[Trainable]:
    """What Ray Tune makes of a trial's function and what that reserves, with names that say so on Ray's dashboard.

    Tune's own are `ImplicitFunc` and `func`.
    """

    names = {"_name": "trial", "__repr__": lambda trial: str(trial.trial_name)}
    return type("Trial", (wrap_function(with_resources(function, resources)),), names)


def install_actor_manager() -> None:
    """Let Ray Tune use `ActorManager`, from now on in this process."""
    tune_controller.RayActorManager = ActorManager
