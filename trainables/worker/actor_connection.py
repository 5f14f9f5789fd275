"""The worker's connection to an actor of `teacher.service`."""

from collections.abc import Callable
from typing import Any

import ray

from trainables.errors import ClusterError, TeacherServiceLostError

ACTOR_NAMESPACE = "raydistill"
"""Ray's namespace of the actors of `teacher.service`."""


class ActorConnection:
    """A `TeacherConnection` to an actor. Large arrays go through Ray's object store, where both sides read them in place."""

    def __init__(self, name: str) -> None:
        """Raises ClusterError: there is no such actor any more."""
        try:
            self._actor = ray.get_actor(name, namespace=ACTOR_NAMESPACE)
        except ValueError as error:
            raise ClusterError(f"teacher.service: its actor {name} has ended: `distill resume` starts another") from error

    def __call__(self, method: str, *arguments: Any) -> Callable[[float], Any]:
        try:
            reference = getattr(self._actor, method).remote(*arguments)
        except ray.exceptions.RayError as error:
            raise TeacherServiceLostError(str(error).splitlines()[0]) from error

        def result(timeout_s: float) -> Any:
            try:
                return ray.get(reference, timeout=timeout_s)
            except ray.exceptions.GetTimeoutError:
                raise
            except ray.exceptions.RayTaskError as error:
                if isinstance(error.cause, TimeoutError):  # to the caller a TimeoutError means that there is no response yet
                    raise TeacherServiceLostError(str(error.cause)) from None
                raise error.cause from None
            except ray.exceptions.RayError as error:  # the actor's process or node died, or the object that it returned is lost
                raise TeacherServiceLostError(type(error).__name__) from error

        return result
