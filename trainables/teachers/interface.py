"""What a training step calls for a teacher's outputs: a network on this rank, a cache, or a client of the service.

Shapes: B samples of this rank, C channels, H W pixels, K classes.
"""

from abc import ABC, abstractmethod
from collections.abc import Generator
from typing import NamedTuple, Self

from torch import Tensor

from trainables.data.loader.loader import Batch, Loader
from trainables.methods.contract import ModelOutputs


class TeacherRequest(NamedTuple):
    """Identifies the images of a forward pass: with the experiment's seed, these decide every pixel of them."""

    indices_B: Tensor
    """Dataset-wide sample indices on the host, int64."""
    epoch: int
    """The epoch by which the images are augmented."""
    partners_B: Tensor | None = None
    """The indices of the images with which they are mixed, on the host; None: they are not."""


class TeacherInterface(ABC):
    """A teacher of a training step. By default it requests nothing ahead, runs for every image and has nothing to release."""

    @abstractmethod
    def __call__(self, images_BCHW: Tensor, num_rows: int, request: TeacherRequest | None = None) -> dict[str, ModelOutputs]:
        """Method key → outputs for the first `num_rows` images; does not wait for the device.

        `request` identifies the images; None: they are dummy images, as in a trial run.
        """

    is_collective = False
    """Whether all ranks that have this teacher call it equally often, see `skip`."""

    def skip(self, images_BCHW: Tensor, num_calls: int) -> None:  # noqa: B027
        """Take part in so many calls of the other ranks that this one has no micro-batches for. `images_BCHW`: any images."""

    def prefetch(self, batches: Generator[Batch, None, None], epoch: int | None) -> Generator[Batch, None, None]:
        """Pass the host batches of an epoch on to the device; a teacher whose outputs come from elsewhere requests them here.

        `epoch`: the one by which the images are augmented; None: they are not, as in validation. Closing the result closes
        `batches`.
        """
        return batches

    def for_validation(self, loader: Loader) -> Self:
        """This teacher for the images of `loader`, which are not augmented; what it holds is closed with this one."""
        return self

    def end_epoch(self) -> int | None:
        """Number of images for which a network ran since the last call; None where it runs for every image.

        What a cache stores of them is on disk when this returns.
        """
        return None

    def close(self) -> None:  # noqa: B027
        """Release files and threads; the teacher is not called again."""
