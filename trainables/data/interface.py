"""The interface of image sources. Shapes: N samples of the split, R samples per read, H=W pixels, C=3 channels."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from trainables.config import DataConfig
from trainables.data.decode import Sample
from trainables.data.order import Order, Split

NO_LABELS = "for images without labels write data.labels: false (distill pack: --no-labels)"
HOLD_OUT = (
    "to hold out some of the training images write data.val_share: 0.1 (distill pack: --val-share 0.1; "
    "to evaluate all of them: --set data.val_share=1)"
)


class Source(ABC):
    """One split of a set of images. Reading is thread-safe."""

    classes: tuple[str, ...]
    """Class names, indexed by the labels; the same for both splits, and empty without labels."""
    labels_N: NDArray[np.int64]
    """The label of every sample; -1 without labels."""
    shard_sizes: Sequence[int] | None = None
    """The number of samples in each shard, in order; None for a source without shards. They sum to the source's length."""
    size: int | None = None
    """Height and width of all images if they are stored as pixels of one size, which `read_batch` reads faster; else None."""

    def __len__(self) -> int:
        return len(self.labels_N)

    @property
    def sets(self) -> "tuple[Source, ...]":
        """The sets that make up this source; `data.path`'s is first."""
        return (self,)

    def order(self, data: DataConfig, split: Split, seed: int) -> Order:
        """Return the order in which to read the samples."""
        sizes = self.shard_sizes
        return Order(split, data.shuffle, seed=seed, num_samples=len(self), shard_sizes=sizes, repeats=data.repeats)

    @abstractmethod
    def name(self, index: int) -> str:
        """Return the sample's name for messages."""

    @abstractmethod
    def read(self, index: int) -> Sample:
        """Read the stored sample. Raises UnreadableImageError if it is unreadable, OSError if the disk or network fails."""

    def checksums_sha256(self) -> str | None:
        """Hash the checksums of all files from an index, without reading an image; None for a source without checksums."""
        return None

    def sizes_sha256(self) -> str | None:
        """Hash the sizes of all files and where the samples are in them; None for a source without files or with checksums.

        It asks the disk for each file, which takes minutes for a million on a network disk. Raises DataError if that fails.
        """
        return None

    def read_batch(self, indices_R: NDArray[np.int64], out_RHWC: NDArray[np.uint8]) -> None:
        """Read the pixels of these samples into `out_RHWC`; only if `size` is set. Raises DataError as the source defines."""
        raise NotImplementedError

    def follow(self, order: Order, epoch: int, position: int) -> None:  # noqa: B027
        """Announce that `order` will be read from this position on; called repeatedly as reading proceeds."""

    def close(self) -> None:  # noqa: B027
        """Release local copies, caches and threads now. The source cannot be read afterward."""
