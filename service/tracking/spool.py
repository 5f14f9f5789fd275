"""What is on its way to the tracking store, on disk: events that the driver appends, and how far each file was delivered.

Nothing here knows the store. `events.jsonl` and `target.json` are the truth; `sent.json` can be found out again.
"""

import contextlib
import json
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trainables.errors import ExperimentError
from trainables.locks import try_lock
from trainables.rundir import RunDir, append_line, append_lines, lines_after, write_json, write_text

CHUNK_BYTES = 64 * 1024
VERSION = 1
"""Of `target.json` and `sent.json`. Files without a version are older; they are read."""
EVENT_FIELDS: Mapping[str, frozenset[str]] = {
    "run": frozenset({"name", "parent", "params", "tags"}),
    "params": frozenset({"values"}),
    "tags": frozenset({"values"}),
    "metrics": frozenset({"step", "metrics"}),
    "follow": frozenset({"path", "stage", "prefix"}),
    "dataset": frozenset({"dataset"}),
    "views": frozenset({"views"}),
    "artifact": frozenset({"path", "artifact_path"}),
    "model": frozenset({"path"}),
    "end": frozenset({"status"}),
}
"""Kind of an event → what it has besides `op`, `key` and `time_ms`."""


Row = tuple[Any, ...]
"""(name, value) of a parameter or tag; (name, value, unix ms, step) of a metric."""


class RefusedError(Exception):
    """The store will never take this record."""


class Delivery(NamedTuple):
    """How sending went: records sent, records still in the spool, and a line for the user."""

    num_sent: int
    num_pending: int
    message: str


class SpoolPart(BaseModel):
    """A part of a spool's files. Keys that this version does not know are left out."""

    model_config = ConfigDict(extra="ignore")


class Target(SpoolPart):
    """Where a spool's records belong. `spool_id` distinguishes its runs from those of every other run directory in one store."""

    version: Literal[0, 1] = 0
    spool_id: str
    uri: str
    experiment: str


class Tail(SpoolPart):
    """A stage of the run's log whose epochs belong to run `key`, delivered up to `offset`; not open: its run has ended."""

    key: str
    path: str
    stage: str
    prefix: str
    offset: int = 0
    open: bool = True


class Cursor(SpoolPart):
    """How far one store was served."""

    offset: int = 0
    experiment_id: str = ""
    runs: dict[str, str] = Field(default_factory=dict)
    """Our run key → the store's run id."""
    creates: dict[str, int] = Field(default_factory=dict)
    """Our run key → how often its creation was requested; counted before the request, since the answer may never come."""
    tails: list[Tail] = Field(default_factory=list)
    deferred: list[dict[str, Any]] = Field(default_factory=list)
    """Events behind `offset` whose files could not be uploaded, each upload once; those tried last stand last."""
    views: list[str] = Field(default_factory=list)
    """Keys of the saved views that the store's experiment has: the table, the charts."""
    refused_runs: dict[str, str] = Field(default_factory=dict)
    """Our run key → why the store takes nothing for this run."""


def is_event(record: Mapping[str, Any]) -> bool:
    """Whether a line of `events.jsonl` is an event as this version writes it."""
    fields = EVENT_FIELDS.get(str(record.get("op")))
    return fields is not None and record.keys() >= fields | {"op", "key", "time_ms"}


class Spool:
    """A run directory's spool folder."""

    def __init__(self, run_dir: RunDir):
        self.root = run_dir.spool
        self._run_root = run_dir.root.absolute()
        self.events = self.root / "events.jsonl"
        self._target = self.root / "target.json"
        self._sent = self.root / "sent.json"
        self.refused = self.root / "refused.jsonl"
        self._lock = self.root / "sender.lock"

    def aim(self, uri: str, experiment: str) -> Target:
        """Say where records go from now on; a spool keeps its id. Raises ExperimentError: see `target`."""
        before = self.target()
        target = Target(version=VERSION, spool_id=before.spool_id if before else uuid.uuid4().hex, uri=uri, experiment=experiment)
        write_json(self._target, target.model_dump())
        return target

    def target(self) -> Target | None:
        """What `aim` wrote last; None: nothing yet.

        Raises ExperimentError: it is damaged, or a newer version wrote it. With another id every run would be created twice.
        """
        try:
            return Target.model_validate_json(self._target.read_bytes())
        except FileNotFoundError:
            return None
        except ValidationError as error:
            raise ExperimentError(
                f"{self._target} is damaged, or of a newer version: put back a copy, or remove it to send everything anew"
            ) from error

    def append(self, op: str, key: str, time_ms: int, **fields: Any) -> None:
        """Add an event, durably; one thread at a time. Raises OSError where the disk does not take it."""
        append_line(self.events, {"op": op, "key": key, "time_ms": time_ms, **fields})

    def name_of(self, path: Path) -> str:
        """`path` as events hold it: relative inside the run directory, so that the directory can be moved."""
        path = path.absolute()
        return str(path.relative_to(self._run_root)) if path.is_relative_to(self._run_root) else str(path)

    def path_of(self, name: str) -> Path:
        return self._run_root / name

    def cursor(self, uri: str) -> Cursor:
        """How far the store at `uri` was served; one that was never met, or is not known any more, has everything to come."""
        try:
            return Cursor.model_validate(self._cursors().get(uri, {}))
        except ValidationError:
            return Cursor()

    def save_cursor(self, uri: str, cursor: Cursor) -> None:
        """Replace the cursor of the store at `uri`, atomically; compact, since it is often written and grows with trials."""
        write_text(self._sent, json.dumps({**self._cursors(), uri: cursor.model_dump(), "version": VERSION}))

    def _cursors(self) -> dict[str, Any]:
        """URI → cursor, and the version; {} where there are none, or where they are damaged or of a newer version."""
        try:
            cursors = json.loads(self._sent.read_bytes())
        except (FileNotFoundError, ValueError):
            return {}
        return cursors if isinstance(cursors, dict) and cursors.get("version", 0) in (0, VERSION) else {}

    def num_pending(self, uri: str) -> int:
        """Records that the store at `uri` has not taken yet: events, lines of followed files, files that were not uploaded."""
        cursor = self.cursor(uri)
        tails = {tail.path: tail.offset for tail in cursor.tails if tail.open}
        count = len(cursor.deferred)
        for record in _records_after(self.events, cursor.offset):
            count += 1
            if is_event(record) and record["op"] == "follow":
                known = [tail.offset for tail in cursor.tails if tail.path == record["path"]]
                tails[record["path"]] = known[0] if known else 0
        return count + sum(1 for path, offset in tails.items() for _ in _records_after(self.path_of(path), offset))

    def runs(self) -> dict[str, str | None]:
        """Every run that was begun, in order, with the status that it ended in last; None while it is open."""
        found: dict[str, str | None] = {}
        for record in _records_after(self.events, 0):
            if is_event(record) and record["op"] in ("run", "end"):
                found[record["key"]] = record.get("status")
        return found

    def set_aside(self, records: Sequence[dict[str, Any]]) -> None:
        """Add records that the store refuses for good, each with its `reason`, so that they do not hold up those behind them."""
        append_lines(self.refused, records)

    def refused_records(self) -> list[dict[str, Any]]:
        return list(_records_after(self.refused, 0))

    def replace_refused(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Leave only these set aside, atomically."""
        if records:
            write_text(self.refused, "".join(json.dumps(record) + "\n" for record in records))
        else:
            self.refused.unlink(missing_ok=True)

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
