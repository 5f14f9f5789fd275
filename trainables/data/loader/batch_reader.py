"""Read the batches of one split with threads, either in the training process or in a loader process.

Nothing here imports torch, which would cost a loader process 300 MiB. Shapes: B samples of this rank's part of a global batch, R
of them that a thread reads, C=3 channels, H W pixels.
"""

import math
import time
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainables.config import DataConfig
from trainables.data.augment import Augment, uniforms
from trainables.data.decode import Sample, UnreadableImageError
from trainables.data.interface import Source
from trainables.data.jpeg import Region
from trainables.data.loader.batch_memory import BatchMemory
from trainables.data.loader.core_wait import CoreWait
from trainables.data.loader.costs import ThreadTimes
from trainables.data.order import REPEAT, Split
from trainables.errors import DataError, DistillError

CHUNKS_PER_THREAD = 4  # per batch: few enough to cost nothing, enough that no thread waits long for the slowest
_READ_AT_ONCE = 8
"""The number of samples read before decoding them: few enough that the encoded images are still in the CPU cache, enough that
Python's code stays in it from one read to the next."""


class Request(NamedTuple):
    """A global batch to read: the positions [begin, end) of an epoch."""

    iteration: int  # over the loader, counted from 1; starting one cancels the earlier ones
    epoch: int
    augmentation_epoch: int
    begin: int
    end: int


class ReadResult(NamedTuple):
    """The result of reading samples of a batch, and the time it took."""

    bad: list[tuple[int, str]]  # row of the batch, why it cannot be read
    encoded_rows: list[Region]  # rows whose pixels are left to the device
    times: ThreadTimes


class Reads(list[Future[ReadResult]]):
    """A batch that is being read, as one future per chunk."""

    def done(self) -> bool:
        return all(part.done() for part in self)

    def result(self) -> ReadResult:
        """Wait for all chunks and merge their results.

        Raises CancelledError if it was stopped, DataError if the source's disk or network fails, and RuntimeError, which names
        the sample, for unexpected errors; DistillError and MemoryError pass through.
        """
        parts = [_result_of(part) for part in self]
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
        self._seed, self._augment, self._order = seed, Augment(data, split), source.order(data, split, seed)
        self._as_stored = self._augment.shows_unchanged(source.size)
        self._core_wait = CoreWait()
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
        # of the whole batch at once: computing them per chunk would take several times as long
        uniforms_BU = uniforms(self._seed, request.augmentation_epoch, new_views_B, self._augment.num_uniforms)
        rows = max(1, math.ceil(len(samples_B) / max(1, self._threads * CHUNKS_PER_THREAD)))
        reads = Reads()
        for row in range(0, len(samples_B), rows):
            part = slice(row, row + rows)
            fill = partial(self._fill, request.iteration, row, samples_B[part], uniforms_BU[part], images_BHWC[part])
            reads.append(self._run(fill))
        return reads

    def stop(self, iteration: int) -> None:
        """Cancel this iteration and the earlier ones: their unfinished reads raise CancelledError."""
        self._stopped = max(self._stopped, iteration)

    def close(self) -> None:
        """Close the source, end the threads and unmap the memory."""
        self._source.close()  # first, since a thread may be waiting for a shard
        if self._pool:
            self._pool.shutdown(cancel_futures=True)
        self.memory.close()

    def _run(self, work: Callable[[], ReadResult]) -> Future[ReadResult]:
        if self._pool:
            return self._pool.submit(work)
        done: Future[ReadResult] = Future()
        done.set_result(work())
        return done

    def _fill(
        self,
        iteration: int,
        first_row: int,
        indices_R: NDArray[np.int64],
        uniforms_RU: NDArray[np.float64],
        out_RHWC: NDArray[np.uint8],
    ) -> ReadResult:
        """Read `indices_R` with their random numbers into `out_RHWC`: the rows of a batch from `first_row` on.

        Rows that stay undefined are listed in the result, as bad or as encoded.
        """
        began_s, began_cpu_s, began_wait_s = time.perf_counter(), time.thread_time(), self._core_wait.seconds()
        source, augment = self._source, self._augment
        bad, encoded_rows, indices = list[tuple[int, str]](), list[Region](), indices_R.tolist()
        if self._as_stored:
            source.read_batch(indices_R, out_RHWC)
        read_s, read_cpu_s = time.perf_counter() - began_s, time.thread_time() - began_cpu_s

        def each(work: Callable[[int], None], rows: Iterable[int]) -> None:
            for row in rows:
                if iteration <= self._stopped:
                    raise CancelledError
                try:
                    work(row)
                except UnreadableImageError as error:
                    bad.append((first_row + row, str(error)))
                except (DistillError, MemoryError):
                    raise
                except Exception as error:
                    raise _sample_error(error, source.name(indices[row])) from error

        samples = dict[int, Sample]()

        def read(row: int) -> None:
            samples[row] = source.read(indices[row])

        def render(row: int) -> None:
            sample = samples.pop(row)
            if augment.on_device and (region := augment.region(first_row + row, sample, uniforms_RU[row])):
                encoded_rows.append(region)
            else:
                augment.render(sample, uniforms_RU[row], out_RHWC[row])

        for first in range(0, 0 if self._as_stored else len(indices), _READ_AT_ONCE):
            before_s, before_cpu_s = time.perf_counter(), time.thread_time()
            each(read, range(first, min(first + _READ_AT_ONCE, len(indices))))
            read_s += time.perf_counter() - before_s
            read_cpu_s += time.thread_time() - before_cpu_s
            each(render, list(samples))
        augment.finish(uniforms_RU, out_RHWC)
        took_s, cpu_s = time.perf_counter() - began_s, time.thread_time() - began_cpu_s
        times = ThreadTimes(took_s, read_s, max(0.0, read_s - read_cpu_s), cpu_s, self._core_wait.seconds() - began_wait_s)
        return ReadResult(sorted(bad), encoded_rows, times)


def _sample_error(error: Exception, sample: str) -> Exception:
    """Turn an error of the source or the decoder into one that names the sample."""
    if isinstance(error, OSError):
        return DataError(f"data.path: {sample} cannot be read: {error.strerror or error}; fix its disk or network, then resume")
    return RuntimeError(f"reading {sample}: {type(error).__name__}: {error}")


def _result_of(part: Future[ReadResult]) -> ReadResult:
    """Wait for a thread's result. Raises its error, always as an Exception: a library's SystemExit must not end this thread."""
    error = part.exception()
    if error is not None and not isinstance(error, Exception):
        raise RuntimeError(f"a loader thread died of {type(error).__name__}: {error}") from error
    return part.result()
