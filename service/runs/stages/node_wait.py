"""Tracks how long a stage or the actors of `teacher.service` have been waiting for nodes."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from service.cluster.resources import Reservation, living_nodes


@dataclass
class NodeWait:
    """The wait of one stage for nodes. Ray Train does the waiting: it fails after a minute without resources and is restarted.

    Meanwhile Ray lists the reservation of workers, or of actors that have not started, as demand for its autoscaler.
    """

    clock: Callable[[], float] = time.monotonic
    _since_s: float | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether there were too few nodes when `refusal` was last called."""
        return self._since_s is not None

    def refusal(self, reservation: Reservation, limit_s: float, log: Callable[[str], None]) -> str | None:
        """Return why the wait is over if the reservation still does not fit after `limit_s`; None if it fits or may wait.

        `limit_s` is `scale.wait_for_nodes_s`. While waiting, `log` gets a line for each call.
        """
        problem = living_nodes().refusal(reservation)
        if problem is None:
            self._since_s = None
            return None
        if self._since_s is None:
            self._since_s = self.clock()
        waited_s = self.clock() - self._since_s
        if waited_s >= limit_s:
            return f"{problem}, and scale.wait_for_nodes_s is {limit_s:g}: run `distill resume` once there are nodes"
        log(f"{problem}: waiting for nodes, for at most {limit_s - waited_s:.0f} s more")
        return None
