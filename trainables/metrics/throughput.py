"""Images per second as users count them: real images over wall time, including waits for the loader but not the warm-up."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from trainables.metrics.clock import Clock

Sums = list[float]
"""[images, seconds, steps]"""


class Window(NamedTuple):
    """Steps between two timestamps of a clock, which may become readable only later."""

    began: Any
    ended: Any
    first_step: int
    num_steps: int


class Throughput:
    """Adds up windows of steps, which exclude evaluations and checkpoints.

    Windows that begin before step `warmup_until` of the stage count as warm-up: first kernels, compilation, caches.
    """

    def __init__(self, clock: Clock, world_size: int, *, warmup_until: int, saved: Mapping[str, Any] | None = None) -> None:
        """`saved` is the `state` of an earlier process of the job, to continue from."""
        self._clock, self.warmup_until = clock, warmup_until
        saved = saved or {"steady": {}, "warmup": [0.0, 0.0, 0.0]}
        self._steady_by_size: dict[str, Sums] = {size: list(sums) for size, sums in saved["steady"].items()}
        self._steady = self._steady_by_size.setdefault(str(world_size), [0.0, 0.0, 0.0])
        """Sums for the current world size, since speed depends on it."""
        self._warmup: Sums = list(saved["warmup"])
        self._began, self._first_step = clock.now(), 0

    def begin(self, step: int) -> None:
        """Begin a window after `step` steps of the stage."""
        self._began, self._first_step = self._clock.now(), step

    def end(self, step: int) -> Window:
        """End the window, and begin the next one immediately."""
        window = Window(self._began, self._clock.now(), self._first_step, step - self._first_step)
        self._began, self._first_step = window.ended, step
        return window

    def add(self, window: Window, images: float) -> float:
        """Add a window that the device has finished, with its images over all ranks. Return its images per second."""
        seconds = self._clock.ms_between(window.began, window.ended) / 1e3
        sums = self._warmup if window.first_step < self.warmup_until else self._steady
        for index, amount in enumerate((images, seconds, window.num_steps)):
            sums[index] += amount
        return images / seconds if seconds > 0 else 0.0

    def state(self) -> dict[str, Any]:
        """Return plain data from which a later process of the job continues."""
        return {"steady": self._steady_by_size, "warmup": self._warmup}

    def summary(self) -> dict[str, float]:
        """Return `images_per_s`, `step_s` and `steady_steps` of the steady state, or of the warm-up if it has no steps."""
        images, seconds, steps = self._steady if self._steady[2] else self._warmup
        if not seconds or not steps:
            return {}
        return {
            "images_per_s": images / seconds,
            "step_s": seconds / steps,
            "steady_steps": self._steady[2],
            "warmup_s": self._warmup[1] if self._steady[2] else 0.0,
        }
