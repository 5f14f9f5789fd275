"""The number of loader threads that a run needs: measured while training runs, for `data.loader_workers: auto`."""

import math

_HEADROOM = 1.25  # times what the mean step takes: files differ in size, and other processes come and go
_MAX_WAIT_FRACTION = 0.02  # of the step: more waiting than this is too much
_MIN_BATCHES = 4


class AutoWorkers:
    """Finds the least number of threads that keeps the step fed, at most `max_threads` (what the worker has reserved).

    It starts with all. In windows of `window_s` seconds it adds up what a thread decodes a second and what the step would take if
    it never waited; two windows in a row that could do with fewer threads lower `threads` to 1.25 times the need. A step that
    waits more than 2% of a window puts them all back at once, and so few are not tried again. The first window is left out:
    caches are cold, and kernels are still being chosen.
    """

    def __init__(self, max_threads: int, window_s: float = 2.0) -> None:
        self.threads = self._max_threads = max_threads
        self._window_s = window_s
        self._fewest, self._last, self._windows = 1, max_threads, 0
        self._reported = False
        self._clear()

    def add(self, images: int, decode_s: float, wait_s: float, wall_s: float) -> str | None:
        """Count a batch: thread-seconds that it took to decode, seconds that the step waited for it, and seconds from the batch
        before to this one. Returns a line on what was found where `threads` is settled or changes.
        """
        self._images += images
        self._decode_s += decode_s
        self._wait_s += wait_s
        self._wall_s += wall_s
        self._batches += 1
        if self.threads < self._max_threads and self._wait_s > _MAX_WAIT_FRACTION * max(self._window_s, self._wall_s):
            return self._use_all()
        if self._wall_s < self._window_s or self._batches < _MIN_BATCHES:
            return None
        line = self._decide() if self._windows else None
        self._windows += 1
        self._clear()
        return line

    def _decide(self) -> str | None:
        """Decide by this window and the one before. Returns a line for the log where the number of threads changes."""
        busy_s = self._wall_s - self._wait_s
        if not (self._images and busy_s > 0 and self._decode_s > 0):
            return None
        a_thread, needed = self._images / self._decode_s, self._images / busy_s
        needed_threads = min(self._max_threads, max(self._fewest, math.ceil(_HEADROOM * needed / a_thread)))
        num_threads, self._last = max(needed_threads, self._last), needed_threads
        if self._windows < 2 or (self._reported and num_threads >= self.threads):
            return None
        self.threads, self._reported = min(num_threads, self.threads), True
        return f"{self._count()}: a thread decodes {a_thread:,.0f} images/s, a step takes {needed:,.0f}"

    def _use_all(self) -> str:
        few, share = self.threads, self._wait_s / self._wall_s
        self.threads = self._last = self._max_threads
        self._fewest = few + 1
        self._clear()
        return f"{self._count()}: with {few} the step waited {100 * share:.0f}% of its time"

    def _count(self) -> str:
        return f"loader workers: {self.threads} of {self._max_threads} (auto)"

    def _clear(self) -> None:
        self._images, self._batches = 0, 0
        self._decode_s = self._wait_s = self._wall_s = 0.0
