"""The messages between a worker and an actor of the teacher service. Knows neither Ray nor torch.

Shapes: B samples of a request, R of them sent with their images, H=W pixels, C=3 channels, K classes.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

NO_ROWS = np.empty(0, dtype=np.int64)


class LogitsRequest(NamedTuple):
    """Asks for the teacher's logits of samples in one epoch's augmentation."""

    key: str
    """See `trainables.teachers.cache.key`: which network, data and augmentation; runs with another suffix after a `-` share the
    network, and no logits."""
    settings: dict[str, Any]
    """The worker's `TrainConfig`, and the classes: what the network is built from."""
    classes: tuple[str, ...]
    epoch: int = 0
    """The epoch by which the images are augmented."""
    indices_B: NDArray[np.int64] = NO_ROWS
    """Dataset-wide sample indices."""
    rows_R: NDArray[np.int64] = NO_ROWS
    """Rows of the B whose images are sent: those that the service said are missing."""
    images_RHWC: NDArray[np.uint8] | None = None
    """As a loader yields them, before the device's augmentation; None: no images."""


class LogitsResponse(NamedTuple):
    """The logits of a request; where `logits_BK` is None, what the client has to send."""

    logits_BK: NDArray[Any] | None = None
    """In float32 or wider."""
    missing: NDArray[np.int64] | None = None
    """Rows whose images the client has to send with the next request."""
    num_computed: int = 0
    """Number of images of this request that the network runs for."""


class TeacherConnection(Protocol):
    """Calls the methods of one `TeacherActor`."""

    def __call__(self, method: str, *arguments: Any) -> Callable[[float], Any]:
        """Begin a call of a method and return at once. The result is a function that waits so many seconds for the return value.

        The function raises TimeoutError where there is no value yet (call it again), TeacherServiceLostError, or what the method
        raised.
        """
