"""What a loader's threads have spent their time on."""

from collections.abc import Iterable
from operator import add
from typing import NamedTuple


class ThreadTimes(NamedTuple):
    """Seconds that a loader thread spent."""

    image_s: float = 0.0  # total
    read_s: float = 0.0  # part of it inside the source
    read_wait_s: float = 0.0  # part of `read_s` waiting for a disk, a network, a lock or a free core
    cpu_s: float = 0.0  # part of `image_s` computing
    core_wait_s: float = 0.0  # part of `image_s` waiting for a free core; 0 if the system does not measure it


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
