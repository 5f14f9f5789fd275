"""Where images come from, by `data.path`: a name in SOURCES, a packed set, or else an image folder.

Shapes: N samples of the split, R samples of a read, H=W pixels, C=3 channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from trainables.config import DataConfig
from trainables.data.decode import Sample
from trainables.data.digits import open_digits
from trainables.data.folder import FolderSource
from trainables.data.index import is_records
from trainables.data.order import Order, Split
from trainables.data.records import open_records
from trainables.data.storage.memory_cache import cached
from trainables.data.storage.remote import is_remote, open_remote
from trainables.data.storage.staging import open_staged
from trainables.data.synthetic import open_synthetic
from trainables.errors import DataError


class Source(Protocol):
    """One split of a labelled set of images. Reading is safe from several threads at once."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Class names; a label is an index into them. The same for both splits."""

    @property
    def labels_N(self) -> NDArray[np.int64]:
        """The label of every sample."""

    def __len__(self) -> int: ...

    def name(self, index: int) -> str:
        """The sample's name for messages."""

    def read(self, index: int) -> Sample:
        """The sample as it is stored. Raises UnreadableImageError where it cannot be read."""

    def fingerprint(self) -> str:
        """A hash of the samples and their order: two sources with one fingerprint show the same image at each index."""


@runtime_checkable
class Sharded(Protocol):
    """A source whose samples lie in shards, one after the other."""

    @property
    def shard_sizes(self) -> Sequence[int]:
        """Samples of each shard in stored order; their sum is the source's length."""


@runtime_checkable
class SupportsPrefetch(Protocol):
    """A source that reads samples faster if it knows them before."""

    def prefetch(self, indices_R: NDArray[np.int64]) -> None:
        """These samples will be read next, one after the other. Raises DataError as `read` does."""


@runtime_checkable
class SupportsReadBatch(Protocol):
    """A source that may hold pixels of one size."""

    @property
    def size(self) -> int | None:
        """Height and width of every image; None where they differ, or are not stored as pixels."""

    def read_batch(self, indices_R: NDArray[np.int64], out_RHWC: NDArray[np.uint8]) -> None:
        """The pixels of these samples, where all have one `size`, into `out_RHWC`. Raises DataError as `read` does."""


@runtime_checkable
class FollowsOrder(Protocol):
    """A source that brings its samples from elsewhere, in the order in which they will be read."""

    def follow(self, order: Order, epoch: int, position: int) -> None:
        """What `order` has from this position on will be read next; called as reading goes on."""


@runtime_checkable
class SupportsClose(Protocol):
    """A source with resources on its node: a copy, a cache, threads that fetch."""

    def close(self) -> None:
        """Free them now, not with the last reference. The source is read no more."""


SOURCES: dict[str, Callable[[DataConfig, Split], Source]] = {
    "digits": lambda data, split: open_digits(split),
    "synthetic": lambda data, split: open_synthetic(split, data.synthetic_images, data.synthetic_classes, data.image_size),
}


def open_source(data: DataConfig, split: Split) -> Source:
    """One split of what `data.path` names. Raises DataError where it is missing, empty or inconsistent."""
    if named := SOURCES.get(data.path):
        return named(data, split)
    if is_remote(data.path):
        return open_remote(data, split)
    return open_records(data.path, split) if is_records(data.path) else FolderSource(data.path, split)


def check_placement(data: DataConfig) -> None:
    """Refuse a `data.stage` or `data.cache` that does not fit the source. Raises DataError."""
    packed = is_remote(data.path) or (data.path not in SOURCES and is_records(data.path))
    if data.stage != "none" and not packed:
        raise DataError(f"data.stage: {data.path} is not a packed set; pack it with `distill pack`, or leave data.stage out")
    if data.cache == "memory" and (packed or data.path in SOURCES):
        instead = "write data.stage=ram" if packed else "it is in memory as it is"
        raise DataError(f"data.cache: {data.path} is not a folder of image files: {instead}, and leave data.cache out")


def open_on_node(data: DataConfig, split: Split) -> Source:
    """`open_source` for a worker, which reads many epochs: from its node's copy or cache, as `data.stage` and `data.cache` say.

    Raises DataError also where they do not fit the source or the node.
    """
    check_placement(data)
    if data.cache == "memory":
        return cached(data, split, open_source(data, split))
    if is_remote(data.path):
        remote = open_remote(data, split)
        remote.check_room(data.shuffle if split == "train" else "none")
        return remote
    return open_source(data, split) if data.stage == "none" else open_staged(data, split)
