"""Faults inside a process: right before its n-th write of a kind of file it dies, stops, or finds its disk full or another time.

Python's audit events show every file that is opened for writing and every rename, whichever thread it is in. The run's log stays
open: its appends are counted where it writes them.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from service.runs.event_log import EventLog
from service.runs.events import Event

Action = Literal["kill", "stop", "fill", "jump"]
WRITES = {
    "checkpoint": r"\.safetensors",
    "cached logits": r"\.arrow",
    "cache's key": r"key\.json",
    "log": r"events\.jsonl$",
    "MLflow's position": r"\.mlflow\.json",
}
"""Kind of file → pattern of its path."""
FILLER = "filler"
"""The file that fills a disk."""


@dataclass(frozen=True)
class FaultPoint:
    """Before which write of a job what happens."""

    action: Action
    written: str
    """A kind of file, see `WRITES`."""
    number: int
    """Counted from 1 in the life of the process."""
    marker: Path
    """A file that is made when it happens, outside the job's folders."""
    disk: Path | None = None
    """The root of the file system that `fill` fills."""
    free_bytes: int = 0
    """What it leaves free there."""
    jump_s: float = 0.0
    """By how much `jump` changes what time it is."""


def written_kind(path: str) -> str | None:
    """Which of `WRITES` a path belongs to."""
    return next((kind for kind, pattern in WRITES.items() if re.search(pattern, path)), None)


def watch_writes(folder: Path, point: FaultPoint | None) -> Counter[str]:
    """Strike this process at `point`; returns a counter of its writes below `folder`, which goes on counting.

    Until the process ends: an audit hook cannot be removed.
    """
    counts, root, struck = Counter[str](), f"{folder}{os.sep}", list[bool]()

    def on_event(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("open", "os.rename"):
            on_write(arguments[1] if event == "os.rename" else _opened_for_writing(*arguments))

    def on_write(path: Any) -> None:
        if struck or not isinstance(path, str | os.PathLike) or not (name := os.fspath(path)).startswith(root):  # type: ignore[arg-type]
            return
        if (kind := written_kind(name)) is None:
            return
        counts[kind] += 1
        if point is not None and (kind, counts[kind]) == (point.written, point.number):
            struck.append(True)
            strike(point)

    write = EventLog._write

    def write_watched(log: EventLog, accepted: Sequence[Event]) -> None:
        on_write(log.path)
        write(log, accepted)

    EventLog._write = write_watched  # type: ignore[method-assign]
    sys.addaudithook(on_event)
    return counts


def _opened_for_writing(path: Any, mode: str | None, flags: int) -> Any:
    """The path; None where it is opened for reading alone, unless it is a temporary file, which is opened to be fsynced."""
    is_temporary = isinstance(path, str) and path.endswith(".tmp")
    return path if flags & (os.O_WRONLY | os.O_RDWR) or is_temporary else None


def strike(point: FaultPoint) -> None:
    """Let it happen to this process, now."""
    point.marker.touch()
    ACTIONS[point.action](point)


def fill(disk: Path, free_bytes: int) -> None:
    """Fill a file system but for `free_bytes`, which are rounded to its blocks."""
    status = os.statvfs(disk)
    size = max(0, status.f_bavail * status.f_frsize - free_bytes)
    with open(disk / FILLER, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, max(1, size))


def _fill(point: FaultPoint) -> None:
    assert point.disk is not None
    fill(point.disk, point.free_bytes)


def _jump(point: FaultPoint) -> None:
    """For Python's code in this process; a clock that is everybody's would need a machine of its own."""
    seconds, nanoseconds = time.time, time.time_ns
    time.time = lambda: seconds() + point.jump_s
    time.time_ns = lambda: nanoseconds() + int(point.jump_s * 1e9)


ACTIONS: dict[Action, Callable[[FaultPoint], None]] = {
    "kill": lambda point: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda point: os.kill(os.getpid(), signal.SIGSTOP),
    "fill": _fill,
    "jump": _jump,
}
