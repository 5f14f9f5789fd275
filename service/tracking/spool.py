"""What is on its way to the tracking store, on disk: events that the driver appends, and how far each file was delivered.

Nothing here knows the store. `events.jsonl` and `target.json` are the truth; what else lies in the folder can be found out again.
"""

import contextlib
import json
import threading
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from trainables.locks import try_lock
from trainables.redact import redact
from trainables.rundir import RunDir, append_line, lines_after, write_json, write_text

CHUNK_BYTES = 64 * 1024


Row = tuple[Any, ...]
"""(name, value) of a parameter or tag; (name, value, unix ms, step) of a metric."""


class RefusedError(Exception):
    """The store will never take this record."""


class Delivery(NamedTuple):
    """How sending went: records sent, records still in the spool, and a line for the user."""

    num_sent: int
    num_pending: int
    message: str


class Target(NamedTuple):
    """Where a spool's records belong. `spool_id` distinguishes its runs from those of every other run directory in one store."""

    spool_id: str
    uri: str
    experiment: str


@dataclass
class Tail:
    """A file of metric records that belongs to run `key`, delivered up to `offset`; not open: its run has ended."""

    key: str
    path: str
    prefix: str
    offset: int = 0
    open: bool = True


@dataclass
class Cursor:
    """How far one store was served."""

    offset: int = 0
    experiment_id: str = ""
    runs: dict[str, str] = field(default_factory=dict)
    """Our run key → the store's run id."""
    creates: dict[str, int] = field(default_factory=dict)
    """Our run key → how often its creation was asked for; counted before asking, since the answer may never come."""
    tails: list[Tail] = field(default_factory=list)


class Spool:
    """A run directory's spool folder."""

    def __init__(self, run_dir: RunDir):
        self.root = run_dir.spool
        self._run_root = run_dir.root.absolute()
        self._appending = threading.Lock()
        self.events = self.root / "events.jsonl"
        self._target = self.root / "target.json"
        self._sent = self.root / "sent.json"
        self.refused = self.root / "refused.jsonl"
        self._lock = self.root / "sender.lock"

    def aim(self, uri: str, experiment: str) -> Target:
        """Say where records go from now on; a spool keeps its id."""
        before = self.target()
        target = Target(before.spool_id if before else uuid.uuid4().hex, uri, experiment)
        write_json(self._target, target._asdict())
        return target

    def target(self) -> Target | None:
        """What `aim` wrote last."""
        values = _read_json(self._target)
        return Target(**values) if values else None

    def append(self, op: str, key: str, time_ms: int, **fields: Any) -> None:
        """Add an event, durably. Raises OSError where the disk does not take it."""
        with self._appending:
            append_line(self.events, {"op": op, "key": key, "time_ms": time_ms, **fields})

    def name_of(self, path: Path) -> str:
        """`path` as events hold it: relative inside the run directory, so that the directory can be moved."""
        path = path.absolute()
        return str(path.relative_to(self._run_root)) if path.is_relative_to(self._run_root) else str(path)

    def path_of(self, name: str) -> Path:
        """The inverse of `name_of`."""
        return self._run_root / name

    def cursor(self, uri: str) -> Cursor:
        """How far the store at `uri` was served; a store that was never met has everything to come."""
        values = _read_json(self._sent).get(uri)
        if not values:
            return Cursor()
        return Cursor(**{**values, "tails": [Tail(**tail) for tail in values["tails"]]})

    def save_cursor(self, uri: str, cursor: Cursor) -> None:
        """Replace the cursor of the store at `uri`, atomically; compact, since it is often written and grows with trials."""
        values = {**vars(cursor), "tails": [vars(tail) for tail in cursor.tails]}
        write_text(self._sent, json.dumps({**_read_json(self._sent), uri: values}))

    def num_pending(self, uri: str) -> int:
        """Records that the store at `uri` has not taken yet: events, and lines of followed files."""
        cursor = self.cursor(uri)
        tails = {tail.path: tail.offset for tail in cursor.tails if tail.open}
        count = 0
        for record in _records_after(self.events, cursor.offset):
            count += 1
            if record["op"] == "follow":
                known = [tail.offset for tail in cursor.tails if tail.path == record["path"]]
                tails[record["path"]] = known[0] if known else 0
        return count + sum(1 for path, offset in tails.items() for _ in _records_after(self.path_of(path), offset))

    def runs(self) -> dict[str, str | None]:
        """Every run that was begun, in order, with the status that it ended in last; None while it is open."""
        found: dict[str, str | None] = {}
        for record in _records_after(self.events, 0):
            if record["op"] in ("run", "end"):
                found[record["key"]] = record.get("status")
        return found

    def set_aside(self, record: Mapping[str, Any], reason: str) -> None:
        """Keep a record that the store refuses for good, with the reason, so that it does not hold up those behind it."""
        append_line(self.refused, {"reason": redact(reason), **record})

    @contextlib.contextmanager
    def sender_lock(self) -> Iterator[bool]:
        """True for the one process that may deliver this spool, False for any other; freed by the process's end at the latest."""
        self.root.mkdir(parents=True, exist_ok=True)
        lock = try_lock(self._lock)
        try:
            yield lock is not None
        finally:
            if lock is not None:
                lock.release()


def _records_after(path: Path, offset: int) -> Iterator[dict[str, Any]]:
    while lines := lines_after(path, offset, CHUNK_BYTES):
        offset = lines[-1].end
        yield from (record for line in lines if (record := line.record) is not None)


def _read_json(path: Path) -> dict[str, Any]:
    """The object in `path`; {} where there is none, since everything read this way can be found out again."""
    try:
        value = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
