"""The kinds and fields of the events in `events.jsonl`, and functions to read the file.

Each line is a JSON object, the first one `{"kind": "log", "version": 1, "id": …}`. Reading takes no lock and runs no user code.
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
"""Kind → required fields of its events, besides `kind` and `time_ms` (unix). Events may have more, such as `trial`.

`stage`, in any kind, is the stage's folder relative to the run's, such as `student` or `trials/003/student-2`.
- `log`: `id` is unique to the log.
- `session_begun`: has the `tags` that identify the code.
- `result`: the fields of `RunResult` that have changed, and of `trials` only the changed rows.
- `attempt`: workers begin on a stage; attempts are numbered throughout the log.
- `summary`: also has the fields of `StageResult`.
- `checkpoint`: `names` are its files in the stage's `checkpoints/`.
- `stage_ended`: only for a run's own stages; trials have `trial_ended`.
- `trial_ended`: one measurement of a trial. With `refused_with`, another trial's id, it is ignored if the trial has ended.
- `discarded`: cancels the earlier events of its `stage`, or the outcome of its `trial`.
"""
ONCE = ("start", "step", "epoch", "summary", "checkpoint")
"""Kinds that a stage has at most once per step, except for checkpoints in an object store."""
OUTLIVES_NODE = frozenset({"notice", "session_begun", "session_ended", "attempt", "checkpoint", "stage_ended", "trial_ended"})
"""Kinds that an object store must have, with all earlier events, before their sender continues."""
_HEAD = re.compile(rb'\{"kind": "(\w+)"(?:, "stage": "([^"\\]*)")?, "time_ms": (\d+)')


def event(kind: str, stage: str | None = None, **fields: Any) -> Event:
    """Create an event with the current time. Raises ValueError: a field is missing."""
    about = {} if stage is None else {"stage": stage}
    made = {"kind": kind, **about, "time_ms": time.time_ns() // 1_000_000, **fields}
    if problem := _problem(made):
        raise ValueError(problem)
    return made


def first_event() -> Event:
    """Create the first event of a new log."""
    return event("log", version=VERSION, id=uuid.uuid4().hex)


def to_line(made: Event) -> bytes:
    """Serialize an event as a line, with secrets in URIs redacted."""
    return json.dumps(redact_values(made)).encode() + b"\n"


def head(raw: bytes) -> tuple[str, str, int]:
    """Return kind, stage and time of a stage's event without parsing the line, or ("", "", 0) for other events."""
    found = _HEAD.match(raw)
    return ("", "", 0) if found is None or found[2] is None else (found[1].decode(), found[2].decode(), int(found[3]))


def parsed(line: Line, path: Path) -> Event | None:
    """Return the event in a line, or None if this version does not know it. A damaged event is logged, and None."""
    record = line.record
    if record is None or record.get("kind") not in FIELDS:  # a kill may have cut the line off
        return None
    if problem := _problem(record):
        log.warning("%s: skipped the line that ends at byte %d: %s", path, line.end, problem)
        return None
    return record


def _problem(record: Event) -> str:
    """Say what is wrong with the fields of an event of a known kind, or ""."""
    names: dict[str, type] = {name: str for name in ("stage", "trial") if name in record}
    for name, kind in {"time_ms": int, **names, **FIELDS[record["kind"]]}.items():
        accepted = (int, float) if kind is float else kind
        if not isinstance(record.get(name), accepted):
            return f"{record['kind']}.{name} must be {kind.__name__}, not {record.get(name)!r:.100}"
    return ""


class Tail:
    """Reads complete new lines of a growing file."""

    def __init__(self, path: Path, offset: int | None = 0) -> None:
        """Start at `offset`, or if None at the end of the file, as soon as its size can be read."""
        self.path, self.offset = path, offset
        if offset is None:
            self.lines()

    def lines(self) -> list[Line]:
        """Return the new lines. There are none while the file cannot be read, as on a file server that is down."""
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
    """Reads new events of a log."""

    def new(self) -> list[Event]:
        """Return the new events, see `Tail.lines`."""
        return [found for line in self.lines() if (found := parsed(line, self.path)) is not None]


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
