"""Writes what a teacher answers, in a thread of its own: the step waits neither for the device nor for the disk.

Shapes: B samples, k kept logits, R rows of a part.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainables.teachers.cache.store import Columns, Store

log = logging.getLogger("raydistill")

PART_BYTES = 32 << 20
PART_S = 60.0
"""A part is written when it is so large, or so old: a kill loses at most that."""
_MOST_WAITING = 64  # batches: where the disk is slower than the teacher, it is the teacher that waits


@dataclass
class _Batch:
    epoch: int
    samples_B: NDArray[np.int64]
    columns: dict[str, Tensor]
    wanted_B: NDArray[np.bool_]
    copied: torch.cuda.Event | None


class Keeper:
    """What is kept of a running teacher. A disk that fails ends the keeping, not the training."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._queue: queue.Queue[_Batch | threading.Event | None] = queue.Queue(_MOST_WAITING)
        self._waiting: list[Columns] = []
        self._bytes, self._epoch, self._since_s = 0, 0, 0.0
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._work, name="answers", daemon=True)
        self._thread.start()

    def add(self, epoch: int, samples_B: NDArray[np.int64], columns: dict[str, Tensor], wanted_B: NDArray[np.bool_]) -> None:
        """Keep the columns of the `wanted_B` of these samples; on a GPU they are copied to the host meanwhile."""
        copied = None
        if columns["top"].is_cuda:
            columns = {name: _copied(tensor) for name, tensor in columns.items()}
            copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            copied.record()  # type: ignore[no-untyped-call]
        self._queue.put(_Batch(epoch, samples_B.copy(), columns, wanted_B, copied))

    @property
    def failure(self) -> OSError | None:
        """Of the disk: nothing is kept since then."""
        return self._failure if isinstance(self._failure, OSError) else None

    def flush(self) -> None:
        """Wait until all of it is on disk. Raises what the thread failed of, unless that was the disk."""
        done = threading.Event()
        self._queue.put(done)
        done.wait()
        if self._failure is not None and not isinstance(self._failure, OSError):
            raise self._failure

    def close(self) -> None:
        """Write the rest and end the thread."""
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        while True:
            try:
                wait_s = max(0.0, self._since_s + PART_S - time.monotonic()) if self._waiting else None
                item = self._queue.get(timeout=wait_s)
            except queue.Empty:
                self._try(self._write)
                continue
            if isinstance(item, _Batch):
                self._try(partial(self._take, item))
                continue
            self._try(self._write)
            if item is None:
                return
            item.set()

    def _try(self, work: Callable[[], None]) -> None:
        """A failure ends the keeping; whoever waits for this thread waits no longer for it."""
        try:
            if self._failure is None:
                work()
        except Exception as error:
            self._failure, self._waiting = error, []
            if isinstance(error, OSError):
                log.warning(
                    "teacher.cache: %s cannot be written (%s): this worker keeps nothing more, and its training goes on",
                    self._store.folder, error.strerror or error,
                )  # fmt: skip

    def _take(self, batch: _Batch) -> None:
        if batch.epoch != self._epoch or self._bytes >= PART_BYTES:
            self._write()
        if batch.copied is not None:
            batch.copied.synchronize()  # type: ignore[no-untyped-call]
        if not self._waiting:
            self._since_s = time.monotonic()
        columns = {name: tensor.numpy()[batch.wanted_B] for name, tensor in batch.columns.items()}
        self._waiting.append({"sample": batch.samples_B[batch.wanted_B].astype(np.int32), **columns})
        self._bytes += int(batch.wanted_B.sum()) * self._store.layout.row_bytes
        self._epoch = batch.epoch

    def _write(self) -> None:
        waiting, self._waiting, self._bytes = self._waiting, [], 0
        if waiting:
            self._store.write(self._epoch, {name: np.concatenate([part[name] for part in waiting]) for name in waiting[0]})


def _copied(tensor: Tensor) -> Tensor:
    """A copy in pinned memory that is on its way."""
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
