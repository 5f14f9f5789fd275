"""Requests to end a stage after its next checkpoint: the worker or a node is about to end, or more workers have room."""

import signal
import threading
import time
from dataclasses import dataclass, field
from types import FrameType

from ray.util.placement_group import PlacementGroup, placement_group_table

from trainables.errors import Interruption
from trainables.worker.ray_internals import is_preempted

MIN_SESSION_S = 60.0
"""Minimum time before a stage restarts with more workers; otherwise two elastic stages would take a node from each other
forever."""
_terminated = threading.Event()


def note_sigterm() -> None:
    """Only note the first SIGTERM; Ray handles the second. Must be called in the process's main thread."""
    ray_handler = signal.getsignal(signal.SIGTERM)

    def note(signum: int, frame: FrameType | None) -> None:
        _terminated.set()
        signal.signal(signal.SIGTERM, ray_handler)

    signal.signal(signal.SIGTERM, note)


@dataclass
class InterruptionRequests:
    """Polled regularly on every rank; see `trainables.engine.interruptions`."""

    more: PlacementGroup | None = None
    """On rank 0, the reservation for additional workers."""
    _began_s: float = field(default_factory=time.monotonic)

    def __call__(self) -> Interruption | None:
        if _terminated.is_set() or is_preempted():
            return "preempted"
        if self.more is None or time.monotonic() - self._began_s < MIN_SESSION_S:
            return None
        if placement_group_table(self.more)["state"] == "CREATED":
            return "resized"
        return None
