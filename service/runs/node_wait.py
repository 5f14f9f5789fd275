"""Waiting for nodes: how long a stage has found too few of them, and what its log says of that."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime

from service.cluster.resources import living_nodes
from service.runs.assignment import Assignment
from trainables.redact import redact
from trainables.rundir import StageDir


@dataclass
class NodeWait:
    """The wait of one stage, which Ray Train does: it fails every minute for lack of resources, and is begun again.

    Meanwhile what the workers reserve stays on Ray's list of demands, by which an autoscaler starts nodes.
    """

    clock: Callable[[], float] = time.monotonic
    _since_s: float | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether there were too few nodes when `refusal` was last called."""
        return self._since_s is not None

    def refusal(self, assignment: Assignment) -> str | None:
        """Why the stage has to end, since it does not fit on the nodes that there are; None: it fits, or waits on."""
        problem, limit_s = living_nodes().refusal(assignment.reservation), assignment.config.scale.wait_for_nodes_s
        if problem is None:
            self._since_s = None
            return None
        if self._since_s is None:
            self._since_s = self.clock()
        waited_s = self.clock() - self._since_s
        if waited_s >= limit_s:
            return f"{problem}, and scale.wait_for_nodes_s is {limit_s:g}: `distill resume` goes on once there are nodes"
        log(assignment.stage_dir, f"{problem}: waiting for nodes, for {limit_s - waited_s:.0f} s more at most")
        return None


def log(stage: StageDir, line: str) -> None:
    """Append a line to the stage's log, which the display shows."""
    stage.log.parent.mkdir(parents=True, exist_ok=True)
    with open(stage.log, "a") as file:
        file.write(f"{datetime.now():%H:%M:%S} {redact(line)}\n")
