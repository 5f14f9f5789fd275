"""What a training step asks of a teacher, however its logits come about: a network here, a cache, or a service.

Shapes: B samples of this rank, C channels, H W pixels, K classes.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import NamedTuple, Protocol

from torch import Tensor

from trainables.data.loader import Batch
from trainables.methods.contract import ModelOutputs


class TeacherRequest(NamedTuple):
    """Which images a teacher is asked about: with the experiment's seed, these two decide every pixel of them."""

    samples_B: Tensor
    """Dataset-wide indices on the host, int64."""
    epoch: int
    """By which they are augmented."""


class TeacherInterface(Protocol):
    """What a step asks: a teacher that runs, here or elsewhere, or what one has answered before."""

    def __call__(self, images_BCHW: Tensor, num_rows: int, asked: TeacherRequest | None = None) -> dict[str, ModelOutputs]:
        """Method → the answer to the first `num_rows` images, without waiting for the device.

        `asked` tells which images they are; None: images that are no samples, such as those of a trial run.
        """

    def ahead(self, batches: Generator[Batch, None, None], epoch: int) -> Generator[Batch, None, None]:
        """The host batches of an epoch, on their way to the device; whoever answers from elsewhere may look at them before.

        `epoch`: by which they are augmented. Closing this closes `batches`.
        """

    def end_epoch(self) -> int | None:
        """How many images a network ran for since this was last asked, where it need not have; None: it always does.

        What is to be kept of them is on disk.
        """

    def close(self) -> None:
        """Let go of files and threads; no more is asked."""
