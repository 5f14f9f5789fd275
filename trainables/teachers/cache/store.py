"""Rows on disk: FOLDER/EPOCH/ROWS-SHA256.arrow, blocks that one worker each writes, named by their content.

A block is an Arrow IPC file of rows (`trainables.teachers.rows`) in one epoch's augmentation, written whole under a temporary
name and renamed; docs/reinforced-data.md has its format. It counts where its checksum is the one in its name. So any number of
jobs fill a folder at once: equal blocks are one file, and overlaps are equal.

Shapes: N samples of the training split, B samples that are read, R rows of a block.
"""

import contextlib
import hashlib
import json
import logging
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from trainables.disk_writer import DiskWriter
from trainables.rundir import write_atomic
from trainables.teachers.rows import PARTNER, Rows

log = logging.getLogger("raydistill")

_STALE_S = 3600.0
_BLOCK = re.compile(r"epoch-(\d+)/(\d+)-[0-9a-f]{64}\.arrow")
Block = dict[str, NDArray[Any]]
"""The columns of a file."""
BLOCK_BYTES = 32 << 20
BLOCK_AGE_S = 60.0
"""A block is written at this size or age: a kill loses at most that."""


def arrow_file(columns: Mapping[str, NDArray[Any]], about: Mapping[str, Any]) -> pa.Buffer:
    """An Arrow IPC file of one record batch: numbers are columns, (N, …) fixed-size lists with their `shape` in the metadata."""
    arrays, fields = [], []
    for name, values in columns.items():
        flat, shape = pa.array(np.ascontiguousarray(values).reshape(-1)), values.shape[1:]
        arrays.append(pa.FixedSizeListArray.from_arrays(flat, math.prod(shape)) if shape else flat)
        fields.append(pa.field(name, arrays[-1].type, nullable=False, metadata={"shape": json.dumps(shape)}))
    schema, sink = pa.schema(fields, metadata={"raydistill": json.dumps(about)}), pa.BufferOutputStream()
    with pa.ipc.new_file(sink, schema) as file:
        file.write_batch(pa.record_batch(arrays, schema=schema))
    return sink.getvalue()


class EpochRows:
    """The rows of one epoch: its blocks, memory-mapped, and an index of 8 bytes a sample, 12 where images are mixed."""

    def __init__(self, blocks: list[Block], row: np.dtype[Any], num_samples: int) -> None:
        self._blocks, self._row = blocks, row
        self._block_N, self._row_N = np.full(num_samples, -1, dtype=np.int32), np.zeros(num_samples, dtype=np.int32)
        self._partner_N = np.full(num_samples if PARTNER in (row.names or ()) else 0, -1, dtype=np.int32)
        for number, block in enumerate(blocks):
            self._block_N[block["sample"]] = number
            self._row_N[block["sample"]] = np.arange(len(block["sample"]))
            if len(self._partner_N):
                self._partner_N[block["sample"]] = block[PARTNER]

    @property
    def missing_N(self) -> NDArray[np.bool_]:
        """A mask (N,) of the samples that have no row."""
        return self._block_N < 0

    def missing(self, indices_B: NDArray[np.int64], partners_B: NDArray[np.int64] | None) -> NDArray[np.bool_]:
        """Return a mask (B,) of samples that have no row, or the row of a mix with another partner."""
        missing_B = self._block_N[indices_B] < 0
        return missing_B if partners_B is None else missing_B | (self._partner_N[indices_B] != partners_B)

    def read(self, indices_B: NDArray[np.int64]) -> Rows:
        """The rows (B,) of samples that are there."""
        rows_B, blocks_B = np.empty(len(indices_B), self._row), self._block_N[indices_B]
        for number in np.unique(blocks_B).tolist():
            selected = np.flatnonzero(blocks_B == number)
            for name, values in self._blocks[number].items():
                rows_B[name][selected] = values[self._row_N[indices_B[selected]]]
        return rows_B


class RowStore:
    """The blocks of one key."""

    def __init__(self, folder: Path, row: np.dtype[Any], num_samples: int, about: Mapping[str, Any] = {}) -> None:
        """`about`: what each block's schema says of them."""
        self.folder, self.row, self.num_samples, self.about = folder, row, num_samples, about
        self._verified: set[Path] = set()

    def write(self, epoch: int, rows: Rows) -> None:
        """Add a block to an epoch. Raises OSError, as where the disk is full."""
        file = arrow_file({name: rows[name] for name in self.row.names or ()}, self.about)
        digest = hashlib.sha256(file).hexdigest()
        write_atomic(self.epoch_folder(epoch) / f"{len(rows)}-{digest}.arrow", file.to_pybytes())

    def open(self, epoch: int) -> EpochRows:
        """The rows of an epoch that are there now. A damaged block is named in the log and left out."""
        paths = sorted(self.epoch_folder(epoch).glob("*.arrow"))
        blocks = [self._map(path) for path in paths if _BLOCK.fullmatch(f"{path.parent.name}/{path.name}")]
        return EpochRows([block for block in blocks if block is not None], self.row, self.num_samples)

    def remove_stale_temporaries(self) -> None:
        """Remove temporary files that killed jobs left an hour ago or more."""
        for temporary in self.folder.glob("epoch-*/.*.tmp"):
            with contextlib.suppress(FileNotFoundError):
                if temporary.stat().st_mtime < time.time() - _STALE_S:
                    temporary.unlink()

    def size(self, num_epochs: int) -> tuple[int, int]:
        """Rows and bytes of the first `num_epochs` epochs, by the files' names; an epoch counts as at most one row a sample.

        Of an epoch that several jobs filled at once, each with blocks of its own, there may be fewer rows than that.
        """
        num_rows, num_bytes = Counter[int](), 0
        for path in self.folder.glob("epoch-*/*.arrow"):
            block = _BLOCK.fullmatch(f"{path.parent.name}/{path.name}")
            if block is not None and int(block[1]) < num_epochs:
                num_rows[int(block[1])] += int(block[2])
                num_bytes += path.stat().st_size
        return sum(min(rows, self.num_samples) for rows in num_rows.values()), num_bytes

    def epoch_folder(self, epoch: int) -> Path:
        return self.folder / f"epoch-{epoch:05}"

    def _map(self, path: Path) -> Block | None:
        """A block's columns, memory-mapped; None where it is damaged."""
        try:
            if path not in self._verified:
                with path.open("rb") as file:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
                if digest not in path.name:
                    raise ValueError("its checksum is not the one in its name")
                self._verified.add(path)
            with pa.memory_map(str(path)) as mapped:
                batch = pa.ipc.open_file(mapped).get_batch(0)
        except (ValueError, OSError) as error:
            log.warning("teacher.cache: %s is left out: %s", path, error)
            return None
        columns = Block()
        for name, (dtype, *_) in (self.row.fields or {}).items():
            array = batch.column(name)
            values = (array.flatten() if pa.types.is_fixed_size_list(array.type) else array).to_numpy()
            columns[name] = values.reshape(len(batch), *dtype.shape)
        return columns


class CacheWriter:
    """Adds a running teacher's rows to a store, in a thread of its own: the step does not wait for the device,
    and for the disk where the block before is still being written.

    A disk that fails ends the writing, not the training.
    """

    def __init__(self, store: RowStore) -> None:
        self.error: OSError | None = None
        """Why nothing is written any more."""
        self._store, self._disk = store, DiskWriter()
        self._batches: list[tuple[Callable[[], Rows], NDArray[np.bool_]]] = []
        self._num_rows, self._epoch, self._oldest_s = 0, 0, 0.0

    def add(self, epoch: int, rows: Callable[[], Rows], missing_B: NDArray[np.bool_]) -> None:
        """Write the `missing_B` of rows; the thread gets them, see `RowFormat.to_host`.

        Where the disk is slower than the teacher, a block waits for the one before it.
        """
        is_full = self._num_rows * self._store.row.itemsize >= BLOCK_BYTES
        if is_full or epoch != self._epoch or time.monotonic() > self._oldest_s + BLOCK_AGE_S:
            self._put_block()
        if not self._batches:
            self._oldest_s = time.monotonic()
        self._batches.append((rows, missing_B))
        self._num_rows += len(missing_B)
        self._epoch = epoch

    def flush(self) -> None:
        """Wait until all of it is on disk, or the disk has failed. Raises what else went wrong in the thread."""
        self._put_block()
        self._wait()

    def close(self) -> None:
        """Write the rest and end the thread."""
        try:
            self.flush()
        finally:
            self._disk.close()

    def _put_block(self) -> None:
        self._wait()
        batches, self._batches, self._num_rows = self._batches, [], 0
        if batches and self.error is None:
            self._disk.put(partial(self._write, self._epoch, batches))

    def _wait(self) -> None:
        try:
            self._disk.wait()
        except OSError as error:
            if self.error is None:
                log.warning(
                    "teacher.cache: %s cannot be written (%s): this worker writes no more, and its training goes on",
                    self._store.folder,
                    error.strerror or error,
                )
            self.error = error

    def _write(self, epoch: int, batches: list[tuple[Callable[[], Rows], NDArray[np.bool_]]]) -> None:
        self._store.write(epoch, np.concatenate([rows()[missing_B] for rows, missing_B in batches]))
