"""Images per second as a user counts them: real images over wall time, waits for the loader included, the warm-up left out."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from trainables.metrics.clock import Clock

Sums = list[float]
"""Images, seconds, steps."""


class Window(NamedTuple):
    """Steps between two points in time of a clock, which may become readable only later."""

    began: Any
    ended: Any
    first_step: int
    num_steps: int


class Throughput:
    """Adds up windows of steps; evaluations and checkpoints lie between windows.

    Windows that began before `warmup_until` (steps of the stage) count as warm-up: first kernels, compilation, caches.
    """

    def __init__(self, clock: Clock, world_size: int, *, warmup_until: int, saved: Mapping[str, Any] | None = None) -> None:
        """`saved`: the `state` of an earlier process of the job, which is continued."""
        self._clock, self.warmup_until = clock, warmup_until
        saved = saved or {"steady": {}, "warmup": [0.0, 0.0, 0.0]}
        self._steady_by_size: dict[str, Sums] = {size: list(sums) for size, sums in saved["steady"].items()}
        self._steady = self._steady_by_size.setdefault(str(world_size), [0.0, 0.0, 0.0])
        """The speed is that of one world size."""
        self._warmup: Sums = list(saved["warmup"])
        self._began, self._first_step = clock.now(), 0

    def begin(self, step: int) -> None:
        """A window begins, after so many steps of the stage."""
        self._began, self._first_step = self._clock.now(), step

    def end(self, step: int) -> Window:
        """The window ends, and the next begins at once."""
        window = Window(self._began, self._clock.now(), self._first_step, step - self._first_step)
        self._began, self._first_step = window.ended, step
        return window

    def add(self, window: Window, images: float) -> float:
        """Add a window, whose end the device has passed, with its images over all ranks. Returns its images per second."""
        seconds = self._clock.ms_between(window.began, window.ended) / 1e3
        sums = self._warmup if window.first_step < self.warmup_until else self._steady
        for index, amount in enumerate((images, seconds, window.num_steps)):
            sums[index] += amount
        return images / seconds if seconds > 0 else 0.0

    def state(self) -> dict[str, Any]:
        """What a later process of the job continues from, as plain data."""
        return {"steady": self._steady_by_size, "warmup": self._warmup}

    def summary(self) -> dict[str, float]:
        """`images_per_s`, `step_s` and `steady_steps` of the steady state, or of all steps where none came after the warm-up.

        Where the job has had several world sizes, `workers2/images_per_s` of each that has reached a steady state.
        """
        images, seconds, steps = self._steady if self._steady[2] else self._warmup
        if not seconds or not steps:
            return {}
        sizes = {size: sums for size, sums in self._steady_by_size.items() if sums[1]} if len(self._steady_by_size) > 1 else {}
        return {
            "images_per_s": images / seconds,
            "step_s": seconds / steps,
            "steady_steps": self._steady[2],
            "warmup_s": self._warmup[1] if self._steady[2] else 0.0,
            **{f"workers{size}/images_per_s": sizes[size][0] / sizes[size][1] for size in sorted(sizes, key=int)},
        }
