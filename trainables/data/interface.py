"""The interface of a source of images. Shapes: N samples of the split, R samples of a read, H=W pixels, C=3 channels."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from trainables.config import DataConfig
from trainables.data.decode import Sample
from trainables.data.order import Order, Split

NO_LABELS = "for images without labels write data.labels: false (distill pack: --no-labels)"
HOLD_OUT = "to hold out some of the training images write data.val_share: 0.1 (distill pack: --val-share 0.1)"
_NAMES_AT_ONCE = 1 << 16


class Source(ABC):
    """One split of a set of images. Reading is safe from several threads at once."""

    classes: tuple[str, ...]
    """Class names; a label is an index into them. The same for both splits; empty: images without labels."""
    labels_N: NDArray[np.int64]
    """The label of every sample; -1 without labels."""
    shard_sizes: Sequence[int] | None = None
    """Of a source whose samples lie in shards, one after the other: the samples of each; their sum is the source's length."""
    size: int | None = None
    """Height and width of every image where all are stored as pixels of one size: `read_batch` is faster then."""
    has_checksums: bool = False
    """Whether `fingerprint` is made of checksums in an index, without a look at the images."""

    def __len__(self) -> int:
        return len(self.labels_N)

    @property
    def sets(self) -> "tuple[Source, ...]":
        """The sets of which it is made, `data.path`'s first."""
        return (self,)

    def order(self, data: DataConfig, split: Split, seed: int) -> Order:
        """The order in which its samples are read."""
        sizes = self.shard_sizes
        return Order(split, data.shuffle, seed=seed, num_samples=len(self), shard_sizes=sizes, repeats=data.repeats)

    @abstractmethod
    def name(self, index: int) -> str:
        """The sample's name for messages."""

    @abstractmethod
    def read(self, index: int) -> Sample:
        """The sample as it is stored. Raises UnreadableImageError where it cannot be read, OSError where disk or network fail."""

    @abstractmethod
    def fingerprint(self) -> str:
        """A hash of the samples and their order: two sources with one fingerprint show the same image at each index."""

    def order_sha256(self) -> str:
        """A hash over the names of all samples in their order."""
        return sha256_of_names([self.name(index) for index in range(len(self))])

    def read_batch(self, indices_R: NDArray[np.int64], out_RHWC: NDArray[np.uint8]) -> None:
        """The pixels of these samples, where all have one `size`, into `out_RHWC`. Raises DataError: see the source."""
        raise NotImplementedError

    def follow(self, order: Order, epoch: int, position: int) -> None:  # noqa: B027
        """What `order` has from this position on will be read next; called as reading goes on."""

    def close(self) -> None:  # noqa: B027
        """Free a copy, a cache or threads on this node now, not with the last reference. The source is read no more."""


def sha256_of_names(names: Sequence[str]) -> str:
    """A hash over names in their order, a million of them in a tenth of a second. They may have bytes that are no UTF-8."""
    digest = hashlib.sha256()
    for begin in range(0, len(names), _NAMES_AT_ONCE):
        joined = "\0".join(names[begin : begin + _NAMES_AT_ONCE])
        digest.update(f"{joined}\0".encode(errors="surrogateescape"))
    return digest.hexdigest()
