"""The work of a loader thread: read samples of a batch into their rows. Shapes: R rows of a batch, C=3 channels, H W pixels."""

import time
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Future
from operator import add
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainables.data.augment import Augment, uniforms
from trainables.data.decode import Sample, UnreadableImageError
from trainables.data.encoded_rows import Region
from trainables.data.interface import Source
from trainables.data.loader.core_wait import CoreWait
from trainables.errors import DataError, DistillError

_CHUNK_SIZE = 8
"""Samples that are read before the first of them is decoded: Python code is in the core's caches from one read to the next, and
the encoded images still are when they are decoded."""


class ThreadTimes(NamedTuple):
    """Seconds of a loader's thread."""

    image_s: float = 0.0  # in all
    read_s: float = 0.0  # of it inside the source
    read_wait_s: float = 0.0  # of that not computing: waiting for a disk, a network, a lock or a free core
    cpu_s: float = 0.0  # of `image_s` computing
    core_wait_s: float = 0.0  # of `image_s` ready to run, while other threads had the cores; 0 where the system does not tell


class ReadResult(NamedTuple):
    """What a thread has read for a batch, and what it took."""

    bad: list[tuple[int, str]]  # row of the batch, why it cannot be read
    encoded_rows: list[Region]  # rows whose pixels are left to the device
    times: ThreadTimes


class Costs:
    """What the loader's threads have spent since `clear`; `threads` is how many work."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.clear()

    def clear(self) -> None:
        """Begin again, as where a warm-up ends."""
        self._images = self._batches = self._copies = 0
        self._wait_s = self._copy_s = 0.0
        self._times: Iterable[float] = ThreadTimes()

    def add_copy(self, seconds: float) -> None:
        """Count a batch that was copied to the device."""
        self._copy_s += seconds
        self._copies += 1

    def add(self, images: int, times: ThreadTimes, wait_s: float) -> None:
        """Count a batch, for which the step waited so long."""
        self._images += images
        self._batches += 1
        self._wait_s += wait_s
        self._times = list(map(add, self._times, times))

    def summary(self) -> dict[str, float]:
        """What the threads do, {} before the first image.

        Milliseconds of a thread an image: `loader/image_ms`; of it `loader/read_ms` inside the source, of which it waited
        `loader/read_wait_ms`; of it `loader/cpu_ms` computing and `loader/core_wait_ms` waiting for a free core. Milliseconds a
        batch: `loader/batch_ms`, in which the threads load one at full speed, and `loader/wait_ms`, for which the
        step's own thread waited; where there is a GPU `loader/copy_ms`, which its copy takes. `loader/threads`: how many work.
        """
        if not self._images:
            return {}
        times = ThreadTimes(*self._times)
        named = {
            f"loader/{name.removesuffix('_s')}_ms": 1e3 * seconds / self._images for name, seconds in times._asdict().items()
        }
        named["loader/batch_ms"] = 1e3 * times.image_s / self.threads / self._batches
        named["loader/wait_ms"] = 1e3 * self._wait_s / self._batches
        if self._copies:
            named["loader/copy_ms"] = 1e3 * self._copy_s / self._copies
        return named | {"loader/threads": float(self.threads)}


class Reader:
    """Reads samples of one split for several threads at once."""

    def __init__(self, source: Source, augment: Augment, seed: int) -> None:
        self._source, self._augment, self._seed = source, augment, seed
        self._as_stored = augment.shows_unchanged(source.size)
        self._core_wait = CoreWait()

    def uniforms(self, epoch: int, views_B: NDArray[np.int64]) -> NDArray[np.float64]:
        """The random numbers (B, U) of a batch: for its parts apart they would take several times as long."""
        return uniforms(self._seed, epoch, views_B, self._augment.num_uniforms)

    def fill(
        self,
        first_row: int,
        indices_R: NDArray[np.int64],
        uniforms_RU: NDArray[np.float64],
        out: list[NDArray[np.uint8]],
        is_stopped: Callable[[], bool],
    ) -> ReadResult:
        """Read `indices_R` into the array out_RHWC that is taken from `out`, the rows of a batch from `first_row` on.

        `uniforms_RU` are their random numbers. Rows that stay undefined are named, as bad or as encoded.

        Raises CancelledError once `is_stopped`, DataError where the source's disk or network fails, and RuntimeError, which
        names the sample, for whatever should not happen; errors of ours and MemoryError as they are.
        """
        began_s, began_cpu_s, began_wait_s = time.perf_counter(), time.thread_time(), self._core_wait.seconds()
        source, augment, out_RHWC = self._source, self._augment, out.pop()
        bad, encoded_rows, indices = list[tuple[int, str]](), list[Region](), indices_R.tolist()
        if self._as_stored:
            source.read_batch(indices_R, out_RHWC)
        read_s, read_cpu_s = time.perf_counter() - began_s, time.thread_time() - began_cpu_s

        def each(work: Callable[[int], None], rows: Iterable[int]) -> None:
            for row in rows:
                if is_stopped():
                    raise CancelledError
                try:
                    work(row)
                except UnreadableImageError as error:
                    bad.append((first_row + row, str(error)))
                except (DistillError, MemoryError):
                    raise
                except Exception as error:
                    raise _named(error, source.name(indices[row])) from error

        samples = dict[int, Sample]()

        def read(row: int) -> None:
            samples[row] = source.read(indices[row])

        def render(row: int) -> None:
            sample = samples.pop(row)
            if augment.on_device and (region := augment.region(first_row + row, sample, uniforms_RU[row])):
                encoded_rows.append(region)
            else:
                augment.render(sample, uniforms_RU[row], out_RHWC[row])

        for first in range(0, 0 if self._as_stored else len(indices), _CHUNK_SIZE):
            before_s, before_cpu_s = time.perf_counter(), time.thread_time()
            each(read, range(first, min(first + _CHUNK_SIZE, len(indices))))
            read_s += time.perf_counter() - before_s
            read_cpu_s += time.thread_time() - before_cpu_s
            each(render, list(samples))
        augment.finish(uniforms_RU, out_RHWC)
        took_s, cpu_s = time.perf_counter() - began_s, time.thread_time() - began_cpu_s
        times = ThreadTimes(took_s, read_s, max(0.0, read_s - read_cpu_s), cpu_s, self._core_wait.seconds() - began_wait_s)
        return ReadResult(sorted(bad), encoded_rows, times)


def _named(error: Exception, sample: str) -> Exception:
    """What a loader raises for an error of its source or its decoder."""
    if isinstance(error, OSError):
        return DataError(
            f"data.path: {sample} cannot be read: {error.strerror or error}; see to the disk or the network that it lies on, "
            "then resume"
        )
    return RuntimeError(f"reading {sample}: {type(error).__name__}: {error}")


def result_of(part: Future[ReadResult]) -> ReadResult:
    """The result of a thread, once it is there. A SystemExit that a library raised in it does not end this thread.

    Raises what the thread died of, as an Exception.
    """
    error = part.exception()
    if error is not None and not isinstance(error, Exception):
        raise RuntimeError(f"a loader thread died of {type(error).__name__}: {error}") from error
    return part.result()
