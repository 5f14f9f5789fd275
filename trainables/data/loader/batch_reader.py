"""Read the batches of one split with threads, either in the training process or in a loader process.

Nothing here imports torch, which would cost a loader process 300 MiB. Shapes: B samples of this rank's part of a global batch.
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

CHUNKS_PER_THREAD = 4  # per batch: few enough to cost nothing, enough that no thread waits long for the slowest


class Request(NamedTuple):
    """A global batch to read: the positions [begin, end) of an epoch."""

    iteration: int  # over the loader, counted from 1; starting one cancels the earlier ones
    epoch: int
    augmentation_epoch: int
    begin: int
    end: int


class Reads(list[Future[ReadResult]]):
    """A batch that is being read, as one future per chunk."""

    def done(self) -> bool:
        return all(part.done() for part in self)

    def result(self) -> ReadResult:
        """Wait for all chunks and merge their results. Raises as `Reader.fill` does: CancelledError if it was stopped."""
        parts = [result_of(part) for part in self]
        bad = [entry for part in parts for entry in part.bad]
        encoded_rows = [region for part in parts for region in part.encoded_rows]
        return ReadResult(bad, encoded_rows, ThreadTimes(*map(sum, zip(*(part.times for part in parts), strict=True))))

    def settle(self) -> None:
        """Cancel the chunks that have not started, and wait until nothing writes to the batch's memory."""
        wait([part for part in self if not part.cancel()])


class BatchReader:
    """Reads this rank's part of global batches into blocks of `memory` with `threads` threads; 0: in the calling thread."""

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
        self._stopped = 0  # iterations up to this one are canceled

    def begin(self, request: Request, block: int) -> Reads:
        """Start reading a batch into a block, which is in use until `result` or `settle` returns."""
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
        """Cancel this iteration and the earlier ones: their unfinished reads raise CancelledError."""
        self._stopped = max(self._stopped, iteration)

    def close(self, wait: bool = True) -> None:
        """Stop reading and close the source; with `wait`, also join the threads and unmap the memory."""
        self._source.close()  # first, since a thread may be waiting for a shard
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
