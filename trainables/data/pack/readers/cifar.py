"""CIFAR-10's and CIFAR-100's binary version (https://www.cs.toronto.edu/~kriz/cifar.html): labels and 3072 bytes a record.

Shapes: C=3 channels, H=W=32 pixels.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from trainables.data.decode import UnreadableImageError
from trainables.data.order import Split
from trainables.data.pack.layout_reader import LayoutReader, Listing, SplitListing, unnamed_labels
from trainables.errors import DataError

_PIXEL_BYTES = 3 * 32 * 32


@dataclass(frozen=True)
class _Kind:
    names: str
    train: tuple[str, ...]
    val: str
    label_bytes: int
    """The class is the last of them: CIFAR-100 has the coarse one before."""


_KINDS = (
    _Kind("batches.meta.txt", tuple(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin", 1),
    _Kind("fine_label_names.txt", ("train.bin",), "test.bin", 2),
)


class CifarReader(LayoutReader):
    """A location is a file and a record's number in it."""

    @staticmethod
    def matches(root: Path) -> bool:
        return any((root / kind.val).is_file() and (root / kind.names).is_file() for kind in _KINDS)

    def listing(self) -> Listing:
        kind = self._kind()
        names = (self._root / kind.names).read_text().split()
        files: dict[Split, tuple[str, ...]] = {"train": kind.train, "val": (kind.val,)}
        return Listing(
            tuple(names), {split: self._split_listing(part, kind, names) for split, part in files.items()}, pixels=True
        )

    def read(self, locations: Sequence[tuple[str, int]]) -> Iterator[tuple[str, NDArray[np.uint8] | UnreadableImageError]]:
        record = self._kind().label_bytes + _PIXEL_BYTES
        for file, number in locations:
            with open(self._root / file, "rb") as content:
                content.seek(number * record + record - _PIXEL_BYTES)
                pixels = content.read(_PIXEL_BYTES)
            name = f"{file}[{number}]"
            if len(pixels) < _PIXEL_BYTES:
                yield name, UnreadableImageError("truncated")
            else:
                pixels_CHW = np.frombuffer(pixels, dtype=np.uint8).reshape(3, 32, 32)
                yield name, np.ascontiguousarray(pixels_CHW.transpose(1, 2, 0))

    def _kind(self) -> _Kind:
        return next(kind for kind in _KINDS if (self._root / kind.val).is_file())

    def _split_listing(self, files: tuple[str, ...], kind: _Kind, names: list[str]) -> SplitListing:
        record = kind.label_bytes + _PIXEL_BYTES
        labels: list[NDArray[np.int64]] = []
        for file in files:
            try:
                content = np.fromfile(self._root / file, dtype=np.uint8)
            except OSError as error:
                raise DataError(f"{self._root / file} cannot be read: {error.strerror}; give all files of the data set") from None
            if not len(content) or len(content) % record:
                raise DataError(f"{self._root / file} has {len(content):,} bytes, not a multiple of {record}; download it again")
            labels.append(content.reshape(-1, record)[:, kind.label_bytes - 1].astype(np.int64))
            if unknown := sorted(set(labels[-1][labels[-1] >= len(names)].tolist())):
                raise unnamed_labels(self._root / file, [str(label) for label in unknown])
        locations = [(file, number) for file, part in zip(files, labels, strict=True) for number in range(len(part))]
        return SplitListing(locations, np.concatenate(labels))
