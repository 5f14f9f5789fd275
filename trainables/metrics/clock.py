"""Points in time on a device, which cost a microsecond each and never stop it."""

import time
from collections.abc import Iterable
from typing import Any

import torch


class Clock:
    """The wall clock. Of other clocks a point in time may become readable only later."""

    def now(self) -> Any:
        """A point in time; costs about a microsecond."""
        return time.perf_counter()

    def ready(self, timestamp: Any) -> bool:
        """Whether `timestamp` can be read; never waits."""
        return True

    def ms_between(self, earlier: Any, later: Any) -> float:
        """Milliseconds from one point to another; both are ready."""
        return float(later - earlier) * 1e3

    def reuse(self, timestamps: Iterable[Any]) -> None:
        """The caller has read `timestamps` and will not use them again."""


class CudaClock(Clock):
    """Events in the current stream of `device`, from a pool: creating one costs more than recording one."""

    def __init__(self, device: torch.device):
        self._device = device
        self._free: list[torch.cuda.Event] = []

    def now(self) -> torch.cuda.Event:
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def ready(self, timestamp: torch.cuda.Event) -> bool:
        return bool(timestamp.query())  # type: ignore[no-untyped-call]

    def ms_between(self, earlier: torch.cuda.Event, later: torch.cuda.Event) -> float:
        return float(earlier.elapsed_time(later))

    def reuse(self, timestamps: Iterable[torch.cuda.Event]) -> None:
        self._free.extend(timestamps)


def clock_of(device: torch.device) -> Clock:
    """The clock of what runs on a device."""
    return CudaClock(device) if device.type == "cuda" else Clock()
