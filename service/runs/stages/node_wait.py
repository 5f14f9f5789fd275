"""Waiting for nodes: how long a stage or the actors of `teacher.service` have found too few, and what they say of it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from service.cluster.resources import Reservation, living_nodes


@dataclass
class NodeWait:
    """The wait of one stage, which Ray Train does: it fails every minute for lack of resources, and is begun again.

    Meanwhile what the workers reserve stays on Ray's list of demands, by which an autoscaler starts nodes. So does what
    actors reserve that have not started.
    """

    clock: Callable[[], float] = time.monotonic
    _since_s: float | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether there were too few nodes when `refusal` was last called."""
        return self._since_s is not None

    def refusal(self, reservation: Reservation, limit_s: float, log: Callable[[str], None]) -> str | None:
        """Why the wait has to end, since what is reserved does not fit on the nodes that there are; None: it fits, or waits on.

        `limit_s` is `scale.wait_for_nodes_s`; `log` gets a line for each call that waits on.
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
        log(f"{problem}: waiting for nodes, for {limit_s - waited_s:.0f} s more at most")
        return None
