"""What `events.jsonl` holds: the kinds of events, their fields, and how the file is read.

One JSON object a line, the first one `{"kind": "log", "version": 1, "id": …}`. Reading takes no lock and runs no code of the run.
"""

import json
import logging
import re
import time
import uuid
from pathlib import Path
from typing import Any

from trainables.redact import redact_values
from trainables.rundir import Line, lines_after

log = logging.getLogger("raydistill")

VERSION = 1
Event = dict[str, Any]
_NUMBERS = {"step": int, "epoch": float, "metrics": dict}
FIELDS: dict[str, dict[str, type]] = {
    "log": {"version": int, "id": str},
    "session_begun": {},
    "session_ended": {"status": str, "reason": str},
    "result": {"changes": dict},
    "notice": {"text": str},
    "stage_begun": {"stage": str, "model": str},
    "attempt": {"stage": str, "attempt": int},
    "start": {"stage": str, **_NUMBERS},
    "resume": {"stage": str, **_NUMBERS},
    "step": {"stage": str, **_NUMBERS},
    "epoch": {"stage": str, **_NUMBERS},
    "summary": {"stage": str, **_NUMBERS},
    "checkpoint": {"stage": str, "step": int, "names": list},
    "restart": {"stage": str, "failure": dict, "restarts": int},
    "hang": {"stage": str, "message": str},
    "stage_ended": {"stage": str, "outcome": dict},
    "trial_ended": {"trial": str, "outcome": dict},
    "discarded": {},
}
"""Kind → the fields that each event of it has beside `kind` and `time_ms` (unix). It may have more, such as `trial`.

`log`: its `id` distinguishes the log from every other one. `session_begun` has the `tags` that say what code runs.
`stage_ended`: of a run's own stages; what a trial's ended in is in its `trial_ended`.
`stage` is the stage's folder, relative to the run's: `student`, `trials/003/student-2`. `checkpoint`: its `names` in the stage's
`checkpoints/`. `result`: fields of `RunResult` that
have changed; of `trials` the rows that have. `attempt`: workers begin on a stage, numbered throughout the log. `summary` has
the fields of `StageResult` too. `trial_ended`: one measurement of a trial; `refused_with`: the trial that it was refused with,
which counts only where it has not ended. `discarded`: what was recorded of its `stage`, or how its `trial` ended, does not count
any more.
"""
ONCE = ("start", "step", "epoch", "summary", "checkpoint")
"""Kinds that a stage has once at a step; a checkpoint in an object store is another one each time."""
OUTLIVES_NODE = frozenset({"session_begun", "session_ended", "attempt", "checkpoint", "stage_ended", "trial_ended"})
"""Kinds whose sender waits, where the run is in an object store, until that has them and all before."""
_HEAD = re.compile(rb'\{"kind": "(\w+)"(?:, "stage": "([^"\\]*)")?, "time_ms": (\d+)')


def event(kind: str, stage: str | None = None, **fields: Any) -> Event:
    """An event of now. Raises ValueError: it lacks a field."""
    about = {} if stage is None else {"stage": stage}
    made = {"kind": kind, **about, "time_ms": time.time_ns() // 1_000_000, **fields}
    if problem := _problem(made):
        raise ValueError(problem)
    return made


def first_event() -> Event:
    """The first event of a new log."""
    return event("log", version=VERSION, id=uuid.uuid4().hex)


def to_line(made: Event) -> bytes:
    """An event as the file has it, the secrets of its URIs hidden."""
    return json.dumps(redact_values(made)).encode() + b"\n"


def head(raw: bytes) -> tuple[str, str, int]:
    """Kind, stage and time of the line of a stage's event, without parsing it; ("", "", 0) of any other."""
    found = _HEAD.match(raw)
    return ("", "", 0) if found is None or found[2] is None else (found[1].decode(), found[2].decode(), int(found[3]))


def parsed(line: Line, path: Path) -> Event | None:
    """The event in a line; None where it has none that this version knows. One that is damaged is logged."""
    record = line.record
    if record is None:  # cut off by a death
        return None
    if record.get("kind") not in FIELDS:
        return None
    if problem := _problem(record):
        log.warning("%s: the line that ends at byte %d is left out: %s", path, line.end, problem)
        return None
    return record


def _problem(record: Event) -> str:
    """What is wrong with the fields of an event of a known kind; "" where nothing is."""
    for name, kind in {"time_ms": int, **FIELDS[record["kind"]]}.items():
        accepted = (int, float) if kind is float else kind
        if not isinstance(record.get(name), accepted):
            return f"{record['kind']}.{name} must be {kind.__name__}, not {record.get(name)!r:.100}"
    return ""


class Tail:
    """The complete lines that a growing file has gained since the last look."""

    def __init__(self, path: Path, offset: int | None = 0) -> None:
        """`offset`: behind the last line; None: at the end that the file has once its size can be read, best now."""
        self.path, self.offset = path, offset
        if offset is None:
            self.lines()

    def lines(self) -> list[Line]:
        """None while the file cannot be read, as on a file server that is down."""
        try:
            if self.offset is None:
                self.offset = _size(self.path)
            lines = lines_after(self.path, self.offset)
        except OSError:
            return []
        if lines:
            self.offset = lines[-1].end
        return lines


class EventTail(Tail):
    """The events that a log has gained since the last look."""

    def new(self) -> list[Event]:
        """See `Tail.lines`."""
        return [found for line in self.lines() if (found := parsed(line, self.path)) is not None]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
