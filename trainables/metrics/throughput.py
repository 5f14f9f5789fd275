"""Images per second as a user counts them: real images over wall time, waits for the loader included, the warm-up left out."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Throughput:
    """Adds up windows between points at which the device was idle.

    Windows that began before `warmup_until` (steps of this process) count as warm-up: first kernels, compilation, caches.
    `warm` and `cold` are changed in index, and continue from those of an earlier process of the job.
    """

    warmup_until: int
    clock: Callable[[], float] = time.perf_counter
    warm: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    cold: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    """Images, seconds, steps."""
    _window_start_s: float = 0.0
    _window_start_step: int = 0

    def begin(self, step: int) -> None:
        """A window begins (an epoch starts; evaluation and checkpoints lie outside windows)."""
        self._window_start_s, self._window_start_step = self.clock(), step

    def end(self, images: float, step: int) -> float:
        """The window ends with `images` trained on over all ranks; the next begins at once. Returns its images per second."""
        now = self.clock()
        seconds = now - self._window_start_s
        sums = self.cold if self._window_start_step < self.warmup_until else self.warm
        for index, amount in enumerate((images, seconds, step - self._window_start_step)):
            sums[index] += amount
        self._window_start_s, self._window_start_step = now, step
        return images / seconds if seconds > 0 else 0.0

    def summary(self) -> dict[str, float]:
        """`images_per_s`, `step_s` and `steady_steps` of the steady state, or of all steps where none came after the warm-up."""
        images, seconds, steps = self.warm if self.warm[2] else self.cold
        if not seconds or not steps:
            return {}
        return {
            "images_per_s": images / seconds,
            "step_s": seconds / steps,
            "steady_steps": self.warm[2],
            "warmup_s": self.cold[1] if self.warm[2] else 0.0,
        }
