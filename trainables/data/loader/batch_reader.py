"""Batches of one split read by threads, wherever these live: in the training process, or in a loader process of its own.

So nothing here imports torch, which would cost a loader process 300 MiB. Shapes: B samples of this rank's part of a global batch,
R of them that a thread reads at a time, C=3 channels, H=W=data.image_size pixels.
"""

import math
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np

from trainables.config import DataConfig
from trainables.data.augment import Augment
from trainables.data.interface import Source
from trainables.data.loader.sample_reader import Reader, ReadResult, result_of
from trainables.data.order import Order, Split, rank_part

CHUNKS_PER_THREAD = 4  # of a batch: few enough to cost nothing, enough that no thread waits long for the slowest


class Request(NamedTuple):
    """A global batch to be read: the positions [begin, end) of an epoch."""

    iteration: int  # of the loader, counted from 1; starting one ends those before it
    epoch: int
    augmentation_epoch: int
    begin: int
    end: int


class Reads(Protocol):
    """A batch that is being read."""

    def done(self) -> bool: ...

    def results(self) -> list[ReadResult]:
        """Waits until all is read. Raises what `Reader.fill` raises, and CancelledError where the iteration was stopped."""

    def end(self) -> None:
        """Waits until nothing writes to the batch's memory any more; what has not begun never does."""


class BatchReader:
    """Reads this rank's part of global batches into blocks of memory, with `threads` threads; 0: with the calling one."""

    def __init__(
        self, source: Source, data: DataConfig, *, split: Split, seed: int, rank: int, world_size: int, threads: int
    ) -> None:
        self.source, self._rank, self._world_size = source, rank, world_size
        self.samples = Reader(source, Augment(data, split), seed)
        self._order = Order(split, data.shuffle, seed=seed, num_samples=len(source), shard_sizes=source.shard_sizes)
        self._threads = threads
        self._pools = [_pool(threads)] if threads else []  # the last one works, the others end
        self._stopped = 0  # this iteration and those before it

    def begin(self, request: Request, block: Sequence[Any]) -> Reads:
        """Set the threads to work on a batch. `block` begins with its images_BCHW, labels_B and indices_B, or more rows of them:
        arrays, or tensors on the CPU.
        """
        self.source.follow(self._order, request.epoch, request.begin)
        positions_B = np.arange(*rank_part(request.begin, request.end, self._rank, self._world_size))
        samples_B = self._order.at(request.epoch, positions_B)
        images_BCHW, labels_B, indices_B = (np.asarray(values)[: len(samples_B)] for values in block[:3])
        images_BHWC = images_BCHW.transpose(0, 2, 3, 1)
        labels_B[:], indices_B[:] = self.source.labels_N[samples_B], samples_B
        uniforms_BU = self.samples.uniforms(request.augmentation_epoch, samples_B)
        is_stopped = partial(self._is_stopped, request.iteration)
        rows = max(1, math.ceil(len(samples_B) / max(1, self._threads * CHUNKS_PER_THREAD)))
        parts = []
        for row in range(0, len(samples_B), rows):
            # In a list that `fill` empties: an executor's thread keeps a finished task's arguments for a while.
            pixels = [images_BHWC[row : row + rows]]
            part = slice(row, row + rows)
            parts.append(self._run(partial(self.samples.fill, row, samples_B[part], uniforms_BU[part], pixels, is_stopped)))
        return _ThreadReads(parts)

    def stop(self, iteration: int) -> None:
        """End the work for this iteration and those before it: what is read of it ends with CancelledError."""
        self._stopped = max(self._stopped, iteration)

    def resize(self, threads: int) -> None:
        """Go on with so many threads (at least 1); what was set to work is finished by those that there were."""
        if self._pools and threads != self._threads:
            self._pools[-1].shutdown(wait=False)
            self._pools.append(_pool(threads))
            self._threads = threads

    def close(self, *, wait: bool = True) -> None:
        """End all work and close the source; with `wait` all threads have ended, too."""
        self.stop(sys.maxsize)
        self.source.close()  # first: a thread may wait for a shard
        for pool in self._pools:
            pool.shutdown(wait=wait, cancel_futures=True)

    def _is_stopped(self, iteration: int) -> bool:
        return iteration <= self._stopped

    def _run(self, work: Callable[[], ReadResult]) -> Future[ReadResult]:
        if self._pools:
            return self._pools[-1].submit(work)
        done: Future[ReadResult] = Future()
        done.set_result(work())
        return done


class _ThreadReads:
    """A batch in parts, each read by a thread; see `Reads`."""

    def __init__(self, parts: list[Future[ReadResult]]) -> None:
        self._parts = parts

    def done(self) -> bool:
        return all(part.done() for part in self._parts)

    def results(self) -> list[ReadResult]:
        return [result_of(part) for part in self._parts]

    def end(self) -> None:
        wait([part for part in self._parts if not part.cancel()])


def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="loader")
