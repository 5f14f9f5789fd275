"""Writes a teacher's logits in a thread of its own: the step waits neither for the device nor for the disk.

Shapes: B samples, k stored logits.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainables.device.bind import bind_thread
from trainables.teachers.cache.store import Columns, LogitsStore

log = logging.getLogger("raydistill")

SEGMENT_BYTES = 32 << 20
SEGMENT_AGE_S = 60.0
"""A segment is written at this size or age: a kill loses at most that."""
_MAX_QUEUED = 64  # batches: where the disk is slower than the teacher, the teacher waits


class CacheWriter:
    """Adds a running teacher's logits to a store. A disk that fails ends the writing, not the training."""

    def __init__(self, store: LogitsStore, device: torch.device) -> None:
        """`device`: the teacher's, whose copies the thread waits for."""
        self._store, self._device = store, device
        self._tasks: queue.Queue[Callable[[], None] | None] = queue.Queue(_MAX_QUEUED)
        self._buffered: list[Columns] = []
        self._num_bytes, self._epoch, self._oldest_s = 0, 0, 0.0
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="cache writer", daemon=True)
        self._thread.start()

    def add(self, epoch: int, indices_B: NDArray[np.int64], columns: dict[str, Tensor], missing_B: NDArray[np.bool_]) -> None:
        """Write the columns of the `missing_B` of these samples; those on a GPU are copied to the host meanwhile."""
        copied = None
        if columns["top"].is_cuda:
            columns = {name: _copy_to_host(tensor) for name, tensor in columns.items()}
            copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            copied.record()  # type: ignore[no-untyped-call]
        self._tasks.put(partial(self._buffer, epoch, indices_B.copy(), columns, missing_B, copied))

    @property
    def disk_error(self) -> OSError | None:
        """Of the disk: nothing is written since."""
        return self._error if isinstance(self._error, OSError) else None

    def flush(self) -> None:
        """Wait until all of it is on disk. Raises the thread's exception, unless that was the disk's."""
        self._tasks.put(self._write)
        self._tasks.join()
        if self._error is not None and not isinstance(self._error, OSError):
            raise self._error

    def close(self) -> None:
        """Write the rest and end the thread."""
        self._tasks.put(self._write)
        self._tasks.put(None)
        self._thread.join()

    def _run(self) -> None:
        self._attempt(partial(bind_thread, self._device))
        while True:
            try:
                task = self._tasks.get(timeout=self._remaining_s())
            except queue.Empty:
                self._attempt(self._write)
                continue
            if task is None:
                return
            self._attempt(task)
            self._tasks.task_done()

    def _remaining_s(self) -> float | None:
        """Seconds until the buffered rows are due; None: there are none."""
        return max(0.0, self._oldest_s + SEGMENT_AGE_S - time.monotonic()) if self._buffered else None

    def _attempt(self, task: Callable[[], None]) -> None:
        """Run a task unless one has failed before: a failure ends the writing, and `flush` does not wait for what follows."""
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
        if epoch != self._epoch or self._num_bytes >= SEGMENT_BYTES:
            self._write()
        if copied is not None:
            copied.synchronize()  # type: ignore[no-untyped-call]
        if not self._buffered:
            self._oldest_s = time.monotonic()
        rows = {name: tensor.numpy()[missing_B] for name, tensor in columns.items()}
        self._buffered.append({"sample": indices_B[missing_B].astype(np.int32), **rows})
        self._num_bytes += int(missing_B.sum()) * self._store.format.row_bytes
        self._epoch = epoch

    def _write(self) -> None:
        buffered, self._buffered, self._num_bytes = self._buffered, [], 0
        if buffered:
            self._store.write(self._epoch, {name: np.concatenate([rows[name] for rows in buffered]) for name in buffered[0]})


def _copy_to_host(tensor: Tensor) -> Tensor:
    """A copy in pinned memory, begun and not waited for."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
