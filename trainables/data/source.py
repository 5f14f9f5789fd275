"""Where images come from, by `data.path`: a name in SOURCES, a packed set, or else an image folder.

Shapes: N samples of the split.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from trainables.config import DataConfig
from trainables.data.decode import Sample
from trainables.data.digits import open_digits
from trainables.data.folder import FolderSource
from trainables.data.order import Split
from trainables.data.records import is_records, open_records
from trainables.data.synthetic import open_synthetic


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
        """What a user recognises the sample by."""

    def read(self, index: int) -> Sample:
        """The sample as it is stored. Raises UnreadableImageError where it cannot be read."""


SOURCES: dict[str, Callable[[DataConfig, Split], Source]] = {
    "digits": lambda data, split: open_digits(split),
    "synthetic": lambda data, split: open_synthetic(split, data.synthetic_images, data.synthetic_classes, data.image_size),
}


def open_source(data: DataConfig, split: Split) -> Source:
    """One split of what `data.path` names. Raises DataError where it is missing, empty or inconsistent."""
    if named := SOURCES.get(data.path):
        return named(data, split)
    return open_records(data.path, split) if is_records(data.path) else FolderSource(data.path, split)
