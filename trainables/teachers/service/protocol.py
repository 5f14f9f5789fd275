"""The messages between a worker and an actor of the teacher service. Knows neither Ray nor torch.

Shapes: B samples of a request, H=W pixels, C=3 channels.
"""

from collections.abc import Awaitable
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray


class ServedModel(NamedTuple):
    """The network that an actor runs for a job."""

    key: str
    """See `trainables.teachers.cache.key`: which network, data and augmentation; jobs with another suffix after a `-` share the
    network, and no rows."""
    settings: dict[str, Any]
    """The worker's `TrainConfig`, and the classes: what the network is built from."""
    classes: tuple[str, ...]
    row_format: Any
    """See `trainables.teachers.rows`."""


class RowsRequest(NamedTuple):
    """Asks for the teacher's rows of samples in one epoch's augmentation."""

    model: ServedModel
    epoch: int | None
    """The epoch by which the images are augmented; None: they are not."""
    indices_B: NDArray[np.int64]
    """Dataset-wide sample indices."""
    images_BHWC: Awaitable[NDArray[np.uint8]]
    """As a loader yields them, before the device's augmentation. They stay with the worker until the actor awaits them."""


class RowsResponse(NamedTuple):
    """The rows of a request."""

    rows_B: NDArray[Any]
    """See `trainables.teachers.rows`."""
    num_computed: int
    """Number of images of this request that the network ran for."""


class TeacherConnection(Protocol):
    """Leads to one `TeacherActor`."""

    def put(self, images_BHWC: NDArray[np.uint8]) -> Awaitable[NDArray[np.uint8]]:
        """Images as a request has them; the worker keeps the result until it has the response."""

    async def __call__(self, request: RowsRequest) -> RowsResponse:
        """What `TeacherActor.rows` returns or raises.

        Raises TeacherServiceLostError: the actor has gone without a response; sending the request again is safe.
        """
