"""Writes a teacher's rows in a thread of its own: the step waits neither for the device nor for the disk.

Shapes: B samples.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainables.device.bind import bind_thread
from trainables.disk_writer import DiskWriter
from trainables.teachers.cache.store import RowStore

log = logging.getLogger("raydistill")

BLOCK_BYTES = 32 << 20
BLOCK_AGE_S = 60.0
"""A block is written at this size or age: a kill loses at most that."""
_MAX_QUEUED = 4
"""Blocks: where the disk is slower than the teacher, the teacher waits."""


class _Batch(NamedTuple):
    indices_B: NDArray[np.int64]
    columns: dict[str, Tensor]
    missing_B: NDArray[np.bool_]
    """The rows that are written."""


class CacheWriter:
    """Adds a running teacher's rows to a store. A disk that fails ends the writing, not the training."""

    def __init__(self, store: RowStore, device: torch.device) -> None:
        """`device`: the teacher's, from which the thread copies."""
        self._store, self._device, self._thread = store, device, DiskWriter()
        self._queued = deque[Future[None]]()
        self._buffered: list[_Batch] = []
        self._num_rows, self._epoch, self._oldest_s = 0, 0, 0.0
        self._error: Exception | None = None
        self._put(partial(bind_thread, device))

    def add(self, epoch: int, indices_B: NDArray[np.int64], columns: dict[str, Tensor], missing_B: NDArray[np.bool_]) -> None:
        """Write the columns of the `missing_B` of these samples, which stay on their device until then."""
        is_full = self._num_rows * self._store.row.itemsize >= BLOCK_BYTES
        if is_full or epoch != self._epoch or time.monotonic() > self._oldest_s + BLOCK_AGE_S:
            self._put_block()
        if not self._buffered:
            self._oldest_s = time.monotonic()
        self._buffered.append(_Batch(indices_B.copy(), columns, missing_B))
        self._num_rows += len(indices_B)
        self._epoch = epoch

    @property
    def disk_error(self) -> OSError | None:
        """Of the disk: nothing is written since."""
        return self._error if isinstance(self._error, OSError) else None

    def flush(self) -> None:
        """Wait until all of it is on disk. Raises the thread's exception, unless that was the disk's."""
        self._put_block()
        self._thread.wait()
        if self._error is not None and not isinstance(self._error, OSError):
            raise self._error

    def close(self) -> None:
        """Write the rest and end the thread."""
        self._put_block()
        self._thread.close()

    def _put_block(self) -> None:
        batches, self._buffered, self._num_rows = self._buffered, [], 0
        if not batches:
            return
        computed = None
        if self._device.type == "cuda":
            computed = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            computed.record()  # type: ignore[no-untyped-call]
        self._put(partial(self._write, self._epoch, batches, computed))

    def _put(self, task: Callable[[], None]) -> None:
        if len(self._queued) == _MAX_QUEUED:
            self._queued.popleft().result()
        self._queued.append(self._thread.put(partial(self._attempt, task)))

    def _attempt(self, task: Callable[[], None]) -> None:
        """Run a task unless one has failed before."""
        try:
            if self._error is None:
                task()
        except Exception as error:
            self._error = error
            if isinstance(error, OSError):
                log.warning(
                    "teacher.cache: %s cannot be written (%s): this worker writes no more logits, and its training goes on",
                    self._store.folder,
                    error.strerror or error,
                )

    def _write(self, epoch: int, batches: list[_Batch], computed: torch.cuda.Event | None) -> None:
        if computed is not None:
            computed.synchronize()  # type: ignore[no-untyped-call]
        rows = {"sample": np.concatenate([batch.indices_B[batch.missing_B] for batch in batches])}
        for name in batches[0].columns:
            rows[name] = np.concatenate([batch.columns[name].cpu().numpy()[batch.missing_B] for batch in batches])
        self._store.write(epoch, rows)
