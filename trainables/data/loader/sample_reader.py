"""The work of a loader thread: read samples into rows of a batch. Shapes: R rows of a batch, C=3 channels, H W pixels."""

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
"""The number of samples read before decoding them: few enough that the encoded images are still in the CPU cache, enough that
Python's code stays in it from one read to the next."""


class ThreadTimes(NamedTuple):
    """Seconds that a loader thread spent."""

    image_s: float = 0.0  # total
    read_s: float = 0.0  # part of it inside the source
    read_wait_s: float = 0.0  # part of `read_s` waiting for a disk, a network, a lock or a free core
    cpu_s: float = 0.0  # part of `image_s` computing
    core_wait_s: float = 0.0  # part of `image_s` waiting for a free core; 0 if the system does not measure it


class ReadResult(NamedTuple):
    """The result of reading samples of a batch, and the time it took."""

    bad: list[tuple[int, str]]  # row of the batch, why it cannot be read
    encoded_rows: list[Region]  # rows whose pixels are left to the device
    times: ThreadTimes


class Costs:
    """The time that the loader's `threads` threads have spent since `clear`."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.clear()

    def clear(self) -> None:
        """Start over, for example after the warm-up."""
        self._images = self._batches = self._copies = 0
        self._wait_s = self._copy_s = 0.0
        self._times: Iterable[float] = ThreadTimes()

    def add_copy(self, seconds: float) -> None:
        """Add a batch that took so long to copy to the device."""
        self._copy_s += seconds
        self._copies += 1

    def add(self, images: int, times: ThreadTimes, wait_s: float) -> None:
        """Add a batch, for which the step waited `wait_s`."""
        self._images += images
        self._batches += 1
        self._wait_s += wait_s
        self._times = list(map(add, self._times, times))

    def summary(self) -> dict[str, float]:
        """Return the costs as metrics; {} before the first image.

        Milliseconds of a thread per image: `loader/image_ms` in total, `loader/read_ms` inside the source, of which
        `loader/read_wait_ms` waiting, `loader/cpu_ms` computing, and `loader/core_wait_ms` waiting for a free core. Milliseconds
        per batch: `loader/batch_ms`, the time the threads need at full speed; `loader/wait_ms`, how long the training thread
        waited; with a GPU, `loader/copy_ms` for the copy to it. `loader/threads` is the number of threads.
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
    """Reads samples of one split. Thread-safe."""

    def __init__(self, source: Source, augment: Augment, seed: int) -> None:
        self._source, self._augment, self._seed = source, augment, seed
        self._as_stored = augment.shows_unchanged(source.size)
        self._core_wait = CoreWait()

    def uniforms(self, epoch: int, views_B: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return the random numbers (B, U) of a whole batch; computing them per chunk would take several times as long."""
        return uniforms(self._seed, epoch, views_B, self._augment.num_uniforms)

    def fill(
        self,
        first_row: int,
        indices_R: NDArray[np.int64],
        uniforms_RU: NDArray[np.float64],
        out: list[NDArray[np.uint8]],
        is_stopped: Callable[[], bool],
    ) -> ReadResult:
        """Read `indices_R` into an array out_RHWC popped from `out`: the rows of a batch from `first_row` on.

        `uniforms_RU` are their random numbers. Rows that stay undefined are listed in the result, as bad or as encoded.

        Raises CancelledError once `is_stopped`, DataError if the source's disk or network fails, and RuntimeError, which names
        the sample, for unexpected errors; DistillError and MemoryError pass through.
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


def _sample_error(error: Exception, sample: str) -> Exception:
    """Turn an error of the source or the decoder into one that names the sample."""
    if isinstance(error, OSError):
        return DataError(f"data.path: {sample} cannot be read: {error.strerror or error}; fix its disk or network, then resume")
    return RuntimeError(f"reading {sample}: {type(error).__name__}: {error}")


def result_of(part: Future[ReadResult]) -> ReadResult:
    """Wait for a thread's result. Raises its error, always as an Exception: a library's SystemExit must not end this thread."""
    error = part.exception()
    if error is not None and not isinstance(error, Exception):
        raise RuntimeError(f"a loader thread died of {type(error).__name__}: {error}") from error
    return part.result()
