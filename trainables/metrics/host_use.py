"""Measure a step's CPU time and its wait for a free core (run-queue delay)."""

import time

from trainables.data.loader.core_wait import CoreWait


class HostUse:
    """Sums over one rank's steps past the warm-up. Each step costs a few microseconds."""

    def __init__(self, warmup_steps: int = 0) -> None:
        self._warmup_left, self._steps = warmup_steps, 0
        self._core_wait = CoreWait()
        self._start_cpu_s, self._start_wait_s = 0.0, 0.0
        self._cpu_s, self._wait_s = 0.0, 0.0

    def start(self) -> None:
        """Begin a step; `stop` must be called in the same thread."""
        self._start_cpu_s, self._start_wait_s = time.process_time(), self._core_wait.seconds()

    def stop(self) -> None:
        if self._warmup_left > 0:
            self._warmup_left -= 1
            return
        self._steps += 1
        self._cpu_s += time.process_time() - self._start_cpu_s
        self._wait_s += self._core_wait.seconds() - self._start_wait_s

    def summary(self) -> dict[str, float]:
        """Return means per step; {} before the first.

        `phase/cpu_ms` is the CPU time of all threads of the process, including the loader's. `phase/core_wait_ms` is the time
        for which the step's own thread was ready to run but had no core.
        """
        if not self._steps:
            return {}
        return {"phase/cpu_ms": 1e3 * self._cpu_s / self._steps, "phase/core_wait_ms": 1e3 * self._wait_s / self._steps}
