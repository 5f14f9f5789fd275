"""The writer of a run's `events.jsonl`. The driver's process writes it, or the actor in `recorder` while Ray runs."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from service.runs.events import ONCE, VERSION, Event, first_event, parsed, to_line
from trainables.errors import ExperimentError
from trainables.locks import try_lock
from trainables.rundir import Line, fsync_directory, lines_after

LOCK_WAIT_S = 30.0
"""How long to wait for the lock: a killed writer holds it until its process is gone."""
CHUNK_BYTES = 1 << 20
"""Bytes of a log that are read at a time."""


class StaleAttemptError(Exception):
    """Workers of an abandoned attempt are still alive, and a newer attempt is working on their stage."""

    def __init__(self, stage: str, attempt: int) -> None:
        super().__init__(stage, attempt)

    def __str__(self) -> str:
        return f"attempt {self.args[1]} at {self.args[0]} was abandoned: a newer one has begun"


class EventLog:
    """The open, locked file. An event of a `ONCE` kind is written once per stage and step, however often a job is resumed."""

    def __init__(self, path: Path, wait_s: float = LOCK_WAIT_S) -> None:
        """Create the log, or continue an existing one.

        Raises:
            ExperimentError: another process holds the lock for `wait_s` seconds, or the log has another version.
            OSError: it cannot be written.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        if (lock := try_lock(path, wait_s)) is None:
            writer = "another process is writing it, such as the ray::Recorder of a killed job"
            raise ExperimentError(f"{path}: {writer}: wait until it ends, or kill the process that `fuser {path}` lists")
        self.path, self._lock = path, lock
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC)
        self._is_loaded = False
        self._load()
        if not self.size:
            self.append([first_event()])
            fsync_directory(path.parent)

    def _load(self) -> None:
        """Index the file, if that is not done yet or a write has failed since."""
        if self._is_loaded:
            return
        self._offsets: dict[str, list[tuple[int, int]]] = {}
        self._recorded: dict[str, set[tuple[Any, ...]]] = {}
        self._attempts: dict[str, int] = {}
        self._end = 0
        for line in log_lines(self.path):
            self._take(parsed(line, self.path), line.end)
        self.size = os.fstat(self._file).st_size
        """Size of the log in bytes."""
        self._is_torn = self.size > self._end
        last = Line(self.read(self._end, self.size), self.size)
        self._take(parsed(last, self.path), self.size)  # it may lack only its newline
        self._end += self._is_torn
        self._is_loaded = True

    @property
    def newest_attempt(self) -> int:
        return max(self._attempts.values(), default=0)

    def append(self, events: Sequence[Event], attempt: int | None = None) -> None:
        """Write events durably: once this returns, they survive a crash of the machine.

        Events that the log has already are skipped, so that a call whose answer was lost may be repeated. A stage's second
        `start` becomes a `resume` without numbers. `attempt` is the attempt of the workers that send the events.

        Raises:
            StaleAttemptError: a newer attempt at the stage has begun.
            OSError: see `append_each`.
        """
        for refusal in self.append_each([(events, attempt)]):
            if refusal is not None:
                raise refusal

    def append_each(self, groups: Sequence[tuple[Sequence[Event], int | None]]) -> list[Exception | None]:
        """`append` several groups of events in one write. Returns for each group why it was refused, or None.

        Raises OSError: the disk is full or cannot be written; the log is unchanged.
        """
        self._load()
        refusals, accepted = list[Exception | None](), list[bytes]()
        for events, attempt in groups:
            try:
                accepted += self._accept(events, attempt)
                refusals.append(None)
            except (StaleAttemptError, TypeError, ValueError) as refusal:
                refusals.append(refusal)
        if accepted:
            self._write(b"\n" * self._is_torn + b"".join(accepted))
        return refusals

    def check_attempt(self, stage: str, attempt: int) -> None:
        """Raises StaleAttemptError: a newer attempt at the stage has begun. Raises OSError: the log cannot be read."""
        self._load()
        if attempt < self._attempts.get(stage, 0):
            raise StaleAttemptError(stage, attempt)

    def _accept(self, events: Sequence[Event], attempt: int | None) -> list[bytes]:
        """Return the lines of the events that are new, and mark these as recorded.

        Raises before any is marked: StaleAttemptError; TypeError or ValueError if an event is not valid JSON.
        """
        attempts = {} if attempt is None else {each["stage"]: attempt for each in events}
        for stage, number in attempts.items():
            self.check_attempt(stage, number)
        lines = [to_line(each) for each in events]
        self._attempts |= attempts
        accepted = []
        for each, line in zip(events, lines, strict=True):
            recorded = self._recorded.get(_key(each), set())
            if each["kind"] == "start" and any(kind == "start" for kind, *_ in recorded):
                each = _as_resume(each)
                line = to_line(each)
            if "refused_with" in each and any(kind == "trial_ended" for kind, *_ in recorded):
                continue
            if _identity(each) not in recorded:
                self._take(each, self._end + len(line))
                accepted.append(line)
        return accepted

    def _take(self, each: Event | None, end: int) -> None:
        """Index the line that ends at offset `end`; `each` is its event, or None if it has none."""
        begin, self._end = self._end, end
        if each is None:
            return
        key = _key(each)
        if each["kind"] == "attempt":
            self._attempts[each["stage"]] = each["attempt"]
        elif each["kind"] == "discarded":
            self._recorded.pop(key, None)
            self._offsets.pop(key, None)
        marks = self._recorded.setdefault(key, set())
        marks.add(_identity(each))
        if each["kind"] == "start":  # a repeated call would send it as a resume
            marks.add(_identity(_as_resume(each)))
        if each["kind"] != "discarded":
            self._offsets.setdefault(key, []).append((begin, end))

    def _write(self, content: bytes) -> None:
        try:
            rest = memoryview(content)
            while rest:
                rest = rest[os.write(self._file, rest) :]
            os.fsync(self._file)
        except BaseException as error:  # including Ctrl-C
            with contextlib.suppress(OSError):  # a partial line that stays is ended by the next write
                os.ftruncate(self._file, self.size)
            self._is_loaded = False
            if isinstance(error, OSError):
                error.filename = str(self.path)
            raise
        self.size, self._is_torn = self._end, False

    def of(self, key: str) -> list[Event]:
        """Return the events of a stage, of a trial given by its folder (`trials/003`), or of the run itself (""), in order.

        Raises OSError: the log cannot be read.
        """
        self._load()
        lines = [Line(self.read(begin, end), end) for begin, end in self._offsets.get(key, ())]
        return [each for line in lines if (each := parsed(line, self.path)) is not None]

    def read(self, begin: int, end: int) -> bytes:
        """Return the bytes in `[begin, end)`."""
        return os.pread(self._file, end - begin, begin)

    def close(self) -> None:
        """Release the log for another process. Later writes here raise OSError."""
        if self._file != -1:
            os.close(self._file)
            self._file = -1
            self._lock.release()


def _identity(each: Event) -> tuple[Any, ...]:
    """Return what two equal events of a stage or trial share: kind and step for a `ONCE` kind, else the whole content.

    Checkpoints in an object store have unique names and so are all distinct.
    """
    if each["kind"] not in ONCE:
        return each["kind"], hash(to_line(each))
    return each["kind"], each["step"], *(name for name in each.get("names", ()) if "-" in name)


def _as_resume(start: Event) -> Event:
    return {**start, "kind": "resume", "metrics": {}}


def _key(each: Event) -> str:
    if "stage" in each:
        return str(each["stage"])
    return f"trials/{each['trial']}" if "trial" in each else ""


def log_lines(path: Path) -> Iterator[Line]:
    """Yield the complete lines of a log, reading it in chunks. Raises ExperimentError: it has another format."""
    end = 0
    while lines := lines_after(path, end, CHUNK_BYTES):
        if not end:
            check_version(path, lines[0].raw)
        yield from lines
        end = lines[-1].end


def check_version(path: Path, first: bytes) -> None:
    """Check the format in a log's first line. Raises ExperimentError: it is another one."""
    if (record := Line(first, 0).record) and record.get("version") != VERSION:
        raise ExperimentError(f"{path} has format {record.get('version')!r}, and this version reads {VERSION}: start a new run")
