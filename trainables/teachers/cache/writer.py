"""Writes a teacher's logits in a thread of its own: the step waits neither for the device nor for the disk.

Shapes: B samples.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainables.device.bind import bind_thread
from trainables.disk_writer import DiskWriter
from trainables.teachers.cache.store import Rows, RowStore

log = logging.getLogger("raydistill")

BLOCK_BYTES = 32 << 20
BLOCK_AGE_S = 60.0
"""A block is written at this size or age: a kill loses at most that."""
_MAX_QUEUED = 64  # batches: where the disk is slower than the teacher, the teacher waits


class CacheWriter:
    """Adds a running teacher's rows to a store. A disk that fails ends the writing, not the training."""

    def __init__(self, store: RowStore, device: torch.device) -> None:
        """`device`: the teacher's, whose copies the thread waits for."""
        self._store, self._thread = store, DiskWriter()
        self._queued = deque[Future[None]]()
        self._buffered: list[Rows] = []
        self._num_rows, self._epoch, self._oldest_s = 0, 0, 0.0
        self._error: Exception | None = None
        self._put(partial(bind_thread, device))

    def add(self, epoch: int, indices_B: NDArray[np.int64], columns: dict[str, Tensor], missing_B: NDArray[np.bool_]) -> None:
        """Write the columns of the `missing_B` of these samples; those on a GPU are copied to the host meanwhile."""
        copied = None
        if any(tensor.is_cuda for tensor in columns.values()):
            columns = {name: _copy_to_host(tensor) for name, tensor in columns.items()}
            copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            copied.record()  # type: ignore[no-untyped-call]
        self._put(partial(self._buffer, epoch, indices_B.copy(), columns, missing_B, copied))

    @property
    def disk_error(self) -> OSError | None:
        """Of the disk: nothing is written since."""
        return self._error if isinstance(self._error, OSError) else None

    def flush(self) -> None:
        """Wait until all of it is on disk. Raises the thread's exception, unless that was the disk's."""
        self._put(self._write).result()
        if self._error is not None and not isinstance(self._error, OSError):
            raise self._error

    def close(self) -> None:
        """Write the rest and end the thread."""
        self._put(self._write)
        self._thread.close()

    def _put(self, task: Callable[[], None]) -> Future[None]:
        if len(self._queued) == _MAX_QUEUED:
            self._queued.popleft().result()
        self._queued.append(self._thread.put(partial(self._attempt, task)))
        return self._queued[-1]

    def _attempt(self, task: Callable[[], None]) -> None:
        """Run a task unless one has failed before."""
        try:
            if self._error is None:
                task()
        except Exception as error:
            self._error, self._buffered = error, []
            if isinstance(error, OSError):
                log.warning(
                    "teacher.cache: %s cannot be written (%s): this worker writes no more logits, and its training goes on",
                    self._store.folder,
                    error.strerror or error,
                )

    def _buffer(
        self,
        epoch: int,
        indices_B: NDArray[np.int64],
        columns: dict[str, Tensor],
        missing_B: NDArray[np.bool_],
        copied: torch.cuda.Event | None,
    ) -> None:
        is_full = self._num_rows * self._store.row.itemsize >= BLOCK_BYTES
        if is_full or epoch != self._epoch or time.monotonic() > self._oldest_s + BLOCK_AGE_S:
            self._write()
        if copied is not None:
            copied.synchronize()  # type: ignore[no-untyped-call]
        if not self._buffered:
            self._oldest_s = time.monotonic()
        rows = {name: tensor.numpy()[missing_B] for name, tensor in columns.items()}
        self._buffered.append({"sample": indices_B[missing_B], **rows})
        self._num_rows += int(missing_B.sum())
        self._epoch = epoch

    def _write(self) -> None:
        buffered, self._buffered, self._num_rows = self._buffered, [], 0
        if buffered:
            self._store.write(self._epoch, {name: np.concatenate([rows[name] for rows in buffered]) for name in buffered[0]})


def _copy_to_host(tensor: Tensor) -> Tensor:
    """A copy in pinned memory, begun and not waited for."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
