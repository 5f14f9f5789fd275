"""Why a worker wants its stage to end after a checkpoint: it, or a node, is about to end, or there is room for more workers."""

import signal
import threading
import time
from dataclasses import dataclass, field
from types import FrameType

from ray.util.placement_group import PlacementGroup, placement_group_table

from trainables.errors import Interruption
from trainables.worker.ray_internals import is_preempted

MIN_SESSION_S = 60.0
"""A stage does not make way for more workers before: two elastic stages would take a free node from each other without end."""
_terminated = threading.Event()


def note_sigterm() -> None:
    """Take the first SIGTERM of this process as a notice, and the second as Ray does. Called in the process's main thread."""
    at_second = signal.getsignal(signal.SIGTERM)

    def note(signum: int, frame: FrameType | None) -> None:
        _terminated.set()
        signal.signal(signal.SIGTERM, at_second)

    signal.signal(signal.SIGTERM, note)


@dataclass
class InterruptionRequests:
    """Called now and then on every rank; see `trainables.engine.interruptions`."""

    more: PlacementGroup | None = None
    """On rank 0: what the stage would have with more workers."""
    _began_s: float = field(default_factory=time.monotonic)

    def __call__(self) -> Interruption | None:
        if _terminated.is_set() or is_preempted():
            return "preempted"
        if self.more is None or time.monotonic() - self._began_s < MIN_SESSION_S:
            return None
        if placement_group_table(self.more)["state"] == "CREATED":
            return "resized"
        return None
