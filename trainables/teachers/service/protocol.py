"""What a worker and a teacher's service say to each other. Knows neither Ray nor a network.

Shapes: B samples asked about, R of them whose images come along, H=W pixels, C=3 channels, K classes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray


class Question(NamedTuple):
    """What a teacher says to these images, in this augmentation."""

    key: str
    """Whose answer, see `trainables.teachers.cache.key`: of which network, to which data, with which augmentation."""
    epoch: int
    """By which the images are augmented."""
    samples_B: NDArray[np.int64]
    """Dataset-wide indices."""
    rows_R: NDArray[np.int64]
    """Those of the B whose images come along: what the service has said that it lacks."""
    images_RHWC: NDArray[np.uint8] | None
    """As a loader gives them, before what the device does; None: no row."""


class Reply(NamedTuple):
    """The answer to a question; where `logits_BK` is None, what has to come first."""

    logits_BK: NDArray[Any] | None = None
    """In float32 or wider."""
    wanted: NDArray[np.int64] | None = None
    """Rows whose images are needed: ask again, and send them. None where the teacher itself is not known: open it."""
    computed: int = 0
    """For how many of the images that came along the network runs."""


class Line(Protocol):
    """One service, however it is reached."""

    def __call__(self, method: str, *arguments: Any) -> Callable[[float], Any]:
        """Begin a call of one of the service's methods; nothing waits. What comes back waits for its result, so many seconds.

        The arguments may be changed once this has returned. The second call raises TimeoutError where there is none yet (ask
        again), LostError, or what the method raised.
        """
