"""Writes a teacher's rows in a thread of its own: the step waits neither for the device nor for the disk.

Shapes: B samples.
"""

import logging
import time
from collections.abc import Callable
from functools import partial

import numpy as np
from numpy.typing import NDArray

from trainables.disk_writer import DiskWriter
from trainables.teachers.cache.store import RowStore
from trainables.teachers.rows import Rows

log = logging.getLogger("raydistill")

BLOCK_BYTES = 32 << 20
BLOCK_AGE_S = 60.0
"""A block is written at this size or age: a kill loses at most that."""


class CacheWriter:
    """Adds a running teacher's rows to a store. A disk that fails ends the writing, not the training."""

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
                    "teacher.cache: %s cannot be written (%s): this worker writes no more logits, and its training goes on",
                    self._store.folder,
                    error.strerror or error,
                )
            self.error = error

    def _write(self, epoch: int, batches: list[tuple[Callable[[], Rows], NDArray[np.bool_]]]) -> None:
        self._store.write(epoch, np.concatenate([rows()[missing_B] for rows, missing_B in batches]))
