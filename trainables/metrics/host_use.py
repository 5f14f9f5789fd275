"""What a step takes of its node's cores: how much of them its process computes on, and how long the step waits for one."""

import time

from trainables.data.loader.core_wait import CoreWait


class HostUse:
    """Sums over the steps of one rank past the warm-up; a few microseconds each."""

    def __init__(self, warmup_steps: int = 0) -> None:
        self._warmup_left, self._steps = warmup_steps, 0
        self._core_wait = CoreWait()
        self._start_cpu_s, self._start_wait_s = 0.0, 0.0
        self._cpu_s, self._wait_s = 0.0, 0.0

    def start(self) -> None:
        """A step begins, in the thread that calls `stop`."""
        self._start_cpu_s, self._start_wait_s = time.process_time(), self._core_wait.seconds()

    def stop(self) -> None:
        if self._warmup_left > 0:
            self._warmup_left -= 1
            return
        self._steps += 1
        self._cpu_s += time.process_time() - self._start_cpu_s
        self._wait_s += self._core_wait.seconds() - self._start_wait_s

    def summary(self) -> dict[str, float]:
        """Means of a step; {} before the first.

        `phase/cpu_ms`: all threads of the process compute, the loader's too. `phase/core_wait_ms`: the step's own thread is
        ready to run while others have the cores.
        """
        if not self._steps:
            return {}
        return {"phase/cpu_ms": 1e3 * self._cpu_s / self._steps, "phase/core_wait_ms": 1e3 * self._wait_s / self._steps}
