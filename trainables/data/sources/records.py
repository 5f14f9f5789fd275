"""A packed set: images in a few large Arrow files instead of a million small ones (docs/records.md describes the format).

`index.json` says what there is, `SPLIT.rows.arrow` where every sample lies, and the shards hold the samples themselves, complete
with labels and names, for any Arrow reader. A worker opens a split by reading two files, whatever its number of shards.

Shapes: N samples of the split, S shards, R samples of a read, H=W pixels where all images have one size, C=3 channels.
"""

import hashlib
import itertools
import os
from bisect import bisect_right
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainables.data.decode import Sample, UnreadableImageError
from trainables.data.index import ROW_COLUMNS, SHARD_COLUMNS, File, Index, SplitIndex, read_index
from trainables.data.interface import NO_LABELS, Source
from trainables.data.order import Order, Split
from trainables.data.sources.shards import LocalShards, ShardReader, unreadable
from trainables.errors import DataError, NoLabelsError
from trainables.notices import notice
from trainables.rundir import expand_home


class RecordsSource(Source):
    """One split of a packed set; see `open_records`. In memory are 32 bytes a sample and nothing else.

    `labels`: False ignores those of the set. Raises DataError: there are none, the rows are damaged or not those of the index.
    """

    shard_sizes: list[int]

    def __init__(self, root: Path, index: Index, split: Split, shards: ShardReader, labels: bool = True) -> None:
        self._opened_with = root, index, split, shards, labels
        if labels and not index.classes:
            raise NoLabelsError(f"data.path: the packed set has no labels: {NO_LABELS}")
        part = index.splits[split]
        table = _read_rows(root / part.rows.file, part.rows)
        self.classes = index.classes
        self.labels_N, self._offsets_N, self.sizes_N, self.widths_N, self.heights_N = (table[name] for name in ROW_COLUMNS)
        self.shard_sizes = [shard.rows for shard in part.shards]
        self._ends_S = list(itertools.accumulate(self.shard_sizes))
        self._shards, self._pixels, self._part = shards, index.image == "pixels", part
        self._check(root / part.rows.file, part)
        if not labels and self.classes:
            notice("data.labels: false: the labels of the packed set are not used")
            self.classes, self.labels_N = (), np.full(len(self), -1, dtype=np.int64)
        side = int(self.widths_N[0])
        one_size = self._pixels and side > 0 and bool((self.widths_N == side).all() and (self.heights_N == side).all())
        self.size = side if one_size else None

    def __reduce__(self) -> tuple[Any, ...]:
        """For another process, which reads the rows from the disk again: those of a billion samples are 32 GB."""
        return RecordsSource, self._opened_with

    def location(self, index: int) -> tuple[int, int]:
        """The shard that holds a sample, and its row there."""
        shard = bisect_right(self._ends_S, index)
        return shard, index - (self._ends_S[shard - 1] if shard else 0)

    def name(self, index: int) -> str:
        """What the source of the packed set called the sample; its shard and row where the shard is damaged, or not here."""
        shard, row = self.location(index)
        path = self._shards.path(shard)
        return _name(path, row) or f"{path.name}[{row}]"

    def checksums_sha256(self) -> str:
        files = (self._part.rows, *self._part.shards)
        return hashlib.sha256(f"{self._pixels} {[file.sha256 for file in files]}".encode()).hexdigest()

    def read(self, index: int) -> Sample:
        """The encoded image file, or the pixels (H, W, 3).

        Raises DataError where the shard cannot be read, or is shorter than its index says.
        """
        content = self._shards.read(bisect_right(self._ends_S, index), self._offsets_N.item(index), self.sizes_N.item(index))
        if not self._pixels:
            return content
        shape = self.heights_N.item(index), self.widths_N.item(index), 3
        if not all(shape):
            raise UnreadableImageError("no pixels")
        return np.frombuffer(content, dtype=np.uint8).reshape(shape)

    def read_batch(self, indices_R: NDArray[np.int64], out_RHWC: NDArray[np.uint8]) -> None:
        """The pixels of these samples, where all have one `size`, into `out_RHWC`. Raises DataError as `read` does."""
        shape = out_RHWC.shape[1:]
        samples = zip(indices_R.tolist(), self._offsets_N[indices_R].tolist(), out_RHWC, strict=True)
        for index, offset, out_HWC in samples:
            content = self._shards.read(bisect_right(self._ends_S, index), offset, out_HWC.nbytes)
            out_HWC[:] = np.frombuffer(content, dtype=np.uint8).reshape(shape)

    def follow(self, order: Order, epoch: int, position: int) -> None:
        self._shards.follow(order, epoch, position)

    def close(self) -> None:
        self._shards.close()

    def _check(self, path: Path, part: SplitIndex) -> None:
        """Every row lies inside its shard, so that no read needs to ask again. Raises DataError."""
        whole = sum(self.shard_sizes) == len(self)
        if whole:
            bytes_N = np.repeat([shard.bytes for shard in part.shards], self.shard_sizes).astype(np.int64)
            whole = (
                (self.labels_N >= (0 if self.classes else -1))
                & (self.labels_N < len(self.classes))
                & (self.widths_N >= 0)
                & (self.heights_N >= 0)
                & (self._offsets_N >= 0)
                & (self.sizes_N >= 0)
                & (self.sizes_N <= bytes_N)
                & (self._offsets_N <= bytes_N - self.sizes_N)
            ).all()
        if whole and self._pixels:
            whole = (self.sizes_N == self.widths_N.astype(np.int64) * self.heights_N * 3).all()
        if not whole:
            raise DataError(f"data.path: {path} does not agree with its index; pack it again")
        if not len(self):
            raise DataError(f"data.path: {path} holds no images; pack it again")


def open_records(path: str, split: Split, labels: bool = True) -> RecordsSource:
    """One split of the packed set in the folder `path`.

    Raises DataError where it is unfinished, a file is missing, has another size than the index says, or is damaged; see also
    RecordsSource.
    """
    root = expand_home(path)
    index = read_index(root)
    return RecordsSource(root, index, split, LocalShards(root, index.splits[split].shards), labels)


def _read_rows(path: Path, file: File) -> dict[str, NDArray[Any]]:
    """The columns of a split's rows, in memory: they are all that a worker keeps of the set."""
    import pyarrow as pa

    from trainables.data.sources.arrow import to_numpy

    try:
        content = path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from None
    if len(content) != file.bytes or hashlib.sha256(content).hexdigest() != file.sha256:
        raise DataError(f"data.path: {path} is not the file that its index describes; copy or pack it again")
    try:
        batch = pa.ipc.open_file(pa.py_buffer(content)).get_batch(0)
        batch.validate()
        if {column.name: str(column.type) for column in batch.schema} != ROW_COLUMNS or len(batch) != file.rows:
            raise pa.ArrowInvalid("other columns")
        return {name: to_numpy(batch.column(name), dtype) for name, dtype in ROW_COLUMNS.items()}
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError(f"data.path: {path} holds no rows ({str(error).splitlines()[0]}); pack it again") from None


def _name(path: Path, row: int) -> str | None:
    """A sample's name from its shard; None where that is damaged or missing."""
    import pyarrow as pa

    try:
        with pa.OSFile(os.fsencode(path)) as file:
            options = pa.ipc.IpcReadOptions(included_fields=[SHARD_COLUMNS.index("name")])
            names = pa.ipc.open_file(file, options=options).get_batch(0).column("name")
        names.validate(full=True)
        return str(names[row].as_py())
    except (pa.ArrowException, OSError, IndexError, KeyError, ValueError):
        return None
