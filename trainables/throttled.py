"""Throttle recurring work to a small fraction of the time."""

import math
import time
from collections.abc import Callable


class Throttled:
    """Recurring work that takes at most a tenth of the time, however long one execution takes."""

    def __init__(self, work: Callable[[], None], *, pause_s: float = 0.0, max_pause_s: float = math.inf) -> None:
        """The work is first due after `pause_s`, then `pause_s` plus 9 times its duration (up to `max_pause_s`) later.

        After an exception it is due again after `pause_s`.
        """
        self._work, self._pause_s, self._max_pause_s = work, pause_s, max_pause_s
        self._next_s = time.monotonic() + pause_s

    def __call__(self) -> None:
        """Do the work, unless it is too early."""
        began_s = time.monotonic()
        if began_s < self._next_s:
            return
        more_s = 0.0
        try:
            self._work()
            more_s = min(9 * (time.monotonic() - began_s), self._max_pause_s)
        finally:
            self._next_s = time.monotonic() + self._pause_s + more_s

    def wait_s(self) -> float:
        """Seconds until the work is due."""
        return max(0.0, self._next_s - time.monotonic())
