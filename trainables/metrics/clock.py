"""Clocks that take timestamps on a device, at a microsecond each and without stopping it."""

import time
from collections.abc import Iterable
from typing import Any

import torch


class Clock:
    """The wall clock. Timestamps of other clocks may become readable only later."""

    def now(self) -> Any:
        """Take a timestamp, which costs about a microsecond."""
        return time.perf_counter()

    def ready(self, timestamp: Any) -> bool:
        """Return whether `timestamp` can be read, without waiting."""
        return True

    def ms_between(self, earlier: Any, later: Any) -> float:
        """Return the milliseconds between two timestamps that are ready."""
        return float(later - earlier) * 1e3

    def reuse(self, timestamps: Iterable[Any]) -> None:
        """Recycle timestamps that the caller will not use again."""


class CudaClock(Clock):
    """CUDA events in the current stream of `device`, pooled because creating one costs more than recording one."""

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
    """Return the clock for work on `device`."""
    return CudaClock(device) if device.type == "cuda" else Clock()
