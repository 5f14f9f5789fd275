"""A worker's connection to a teacher actor (`teacher.service`)."""

from collections.abc import Awaitable

import numpy as np
import ray
from numpy.typing import NDArray

from trainables.errors import ClusterError, TeacherServiceLostError
from trainables.teachers.service.protocol import RowsRequest, RowsResponse

ACTOR_NAMESPACE = "raydistill"
"""The Ray namespace of teacher actors."""


class ActorConnection:
    """A `TeacherConnection` to an actor. Images stay in the object store of the worker's node until the actor fetches them."""

    def __init__(self, name: str) -> None:
        """Raises ClusterError: the actor no longer exists."""
        try:
            self._actor = ray.get_actor(name, namespace=ACTOR_NAMESPACE)
        except ValueError as error:
            raise ClusterError(f"teacher.service: its actor {name} has ended: run `distill resume` to start another") from error

    def put(self, images_BHWC: NDArray[np.uint8]) -> Awaitable[NDArray[np.uint8]]:
        images: Awaitable[NDArray[np.uint8]] = ray.put(images_BHWC)
        return images

    async def __call__(self, request: RowsRequest) -> RowsResponse:
        try:
            response: RowsResponse = await self._actor.rows.remote(request)
            return response
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, TimeoutError):  # to the caller, TimeoutError means that there was no response
                raise TeacherServiceLostError(str(error.cause)) from None
            raise error.cause from None
        except ray.exceptions.RayError as error:  # the actor's process or node died, or its returned object was lost
            raise TeacherServiceLostError(type(error).__name__) from error
