"""Work that is done again and again, and is not to take all of the time."""

import math
import time
from collections.abc import Callable


class Paced:
    """Something that is done again and again, and takes at most a tenth of the time, however long it takes once."""

    def __init__(self, work: Callable[[], None], *, pause_s: float = 0.0, most_s: float = math.inf) -> None:
        """Each time is at least `pause_s` after the last, the first one after now; at most `most_s` more than that.

        What raises is done again after `pause_s`.
        """
        self._work, self._pause_s, self._most_s = work, pause_s, most_s
        self._next_s = time.monotonic() + pause_s

    def __call__(self) -> None:
        """Do it, unless it is too early."""
        began_s = time.monotonic()
        if began_s < self._next_s:
            return
        more_s = 0.0
        try:
            self._work()
            more_s = min(9 * (time.monotonic() - began_s), self._most_s)
        finally:
            self._next_s = time.monotonic() + self._pause_s + more_s

    def wait_s(self) -> float:
        """Seconds until it may be done again."""
        return max(0.0, self._next_s - time.monotonic())
