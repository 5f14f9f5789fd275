"""Batches of one split read by threads, wherever these live: in the training process, or in a loader process of its own.

So nothing here imports torch, which would cost a loader process 300 MiB. Shapes: B samples of this rank's part of a global batch.
"""

import math
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import NamedTuple

from trainables.config import DataConfig
from trainables.data.augment import Augment
from trainables.data.interface import Source
from trainables.data.loader.batch_memory import BatchMemory
from trainables.data.loader.sample_reader import Reader, ReadResult, ThreadTimes, result_of
from trainables.data.order import REPEAT, Split

CHUNKS_PER_THREAD = 4  # of a batch: few enough to cost nothing, enough that no thread waits long for the slowest


class Request(NamedTuple):
    """A global batch to be read: the positions [begin, end) of an epoch."""

    iteration: int  # of the loader, counted from 1; starting one ends those before it
    epoch: int
    augmentation_epoch: int
    begin: int
    end: int


class Reads(list[Future[ReadResult]]):
    """A batch that is being read, in parts."""

    def done(self) -> bool:
        return all(part.done() for part in self)

    def result(self) -> ReadResult:
        """What was read, as one part, once all is. Raises what `Reader.fill` raises: CancelledError where it was stopped."""
        parts = [result_of(part) for part in self]
        bad = [entry for part in parts for entry in part.bad]
        encoded_rows = [region for part in parts for region in part.encoded_rows]
        return ReadResult(bad, encoded_rows, ThreadTimes(*map(sum, zip(*(part.times for part in parts), strict=True))))

    def settle(self) -> None:
        """Wait until nothing writes to the batch's memory any more; what has not begun never does."""
        wait([part for part in self if not part.cancel()])


class BatchReader:
    """Reads this rank's part of global batches into blocks of `memory` with `threads` threads; 0: with the calling one."""

    def __init__(
        self,
        memory: BatchMemory,
        source: Source,
        data: DataConfig,
        *,
        split: Split,
        seed: int,
        rank: int,
        world_size: int,
        threads: int,
    ) -> None:
        self.memory, self._source, self._rank, self._world_size = memory, source, rank, world_size
        self._samples = Reader(source, Augment(data, split), seed)
        self._order = source.order(data, split, seed)
        self._threads = threads
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="loader") if threads else None
        self._stopped = 0  # this iteration and those before it

    def begin(self, request: Request, block: int) -> Reads:
        """Set the threads to work on a batch. Its block is in use until `result` or `settle` returns."""
        self._source.follow(self._order, request.epoch, request.begin // self._order.repeats)
        new_views_B = self._order.views(request.epoch, request.begin, request.end, self._rank, self._world_size)
        samples_B = new_views_B % REPEAT
        images_BHWC, labels_B, views_B = self.memory.arrays(block, len(samples_B))
        labels_B[:], views_B[:] = self._source.labels_N[samples_B], new_views_B
        uniforms_BU = self._samples.uniforms(request.augmentation_epoch, new_views_B)
        rows = max(1, math.ceil(len(samples_B) / max(1, self._threads * CHUNKS_PER_THREAD)))
        reads = Reads()
        for row in range(0, len(samples_B), rows):
            part = slice(row, row + rows)
            fill = partial(self._samples.fill, row, samples_B[part], uniforms_BU[part], [images_BHWC[part]])
            reads.append(self._run(partial(fill, lambda: request.iteration <= self._stopped)))
        return reads

    def stop(self, iteration: int) -> None:
        """End the work for this iteration and those before it: what is still to be read of it ends with CancelledError."""
        self._stopped = max(self._stopped, iteration)

    def close(self, wait: bool = True) -> None:
        """End all work and close the source; with `wait` all threads have ended, too, and the memory is free."""
        self._source.close()  # first: a thread may wait for a shard
        if self._pool:
            self._pool.shutdown(wait=wait, cancel_futures=True)
        if wait:
            self.memory.close()

    def _run(self, work: Callable[[], ReadResult]) -> Future[ReadResult]:
        if self._pool:
            return self._pool.submit(work)
        done: Future[ReadResult] = Future()
        done.set_result(work())
        return done
