"""The paths of a run directory, owned by one object, and atomic and durable writes to them."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from trainables.errors import ExperimentError
from trainables.redact import redact_uris, redact_values

OLD_FILE_S = 90.0
"""So long a node may see an older file than its writer; NFS keeps what it knows of a folder for a minute (`acdirmax`)."""


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path next to `path` to write to; at the end it is fsynced and renamed to `path`.

    A reader, or a machine that dies, sees the old file or the new one. Raises OSError where the disk is full or the folder
    cannot be written; the old file is then still there.
    """
    # By chance, not by the process's number: on a disk that nodes share there may be two of one number.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
        fsync_directory(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_atomic(path: Path, content: bytes) -> None:
    """Replace `path` with `content`; see `replacing`."""
    with replacing(path) as temporary:
        temporary.write_bytes(content)


def remove_unfinished(path: Path) -> None:
    """Remove what kills have left of writes of `path`; its only writer calls this."""
    for temporary in path.parent.glob(f".{path.name}.*.tmp"):
        temporary.unlink(missing_ok=True)


def expand_home(path: str | Path) -> Path:
    """`path`, a `~` or `~USER` at its beginning replaced by that user's home. Raises ExperimentError: there is no such user."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ExperimentError(f"{path}: {Path(path).parts[0]} is nobody's home on this machine: write the whole path") from error


def unwritable_reason(folder: Path) -> str | None:
    """Why nothing can be written into a folder, existing or not yet created; None: it can."""
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.exists(path))
    if not there.is_dir():
        return f"{there} is not a folder"
    return None if os.access(there, os.W_OK | os.X_OK) else f"{there} is read-only for you"


def create_private(folder: Path) -> None:
    """Create a folder that its user alone can enter; one that is there keeps its mode."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def fsync_directory(path: Path) -> None:
    """Make a rename inside `path` durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text(path: Path, text: str) -> None:
    """Replace `path` with `text`, in which the secrets of URIs are hidden; see `replacing`."""
    write_atomic(path, redact_uris(text).encode())


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, atomically, the secrets of its URIs hidden."""
    write_atomic(path, (json.dumps(redact_values(value), indent=2) + "\n").encode())


class Line(NamedTuple):
    """A complete line of a file of JSON lines."""

    raw: bytes
    end: int
    """Byte offset behind the line."""

    @property
    def record(self) -> dict[str, Any] | None:
        """The object in the line; None where it has none, such as a line that a death cut off and a later writer ended."""
        try:
            record = json.loads(self.raw)
        except ValueError:
            return None
        return record if isinstance(record, dict) else None


def lines_after(path: Path, offset: int, chunk_bytes: int | None = None) -> list[Line]:
    """The complete lines of a growing file behind byte `offset`; [] at its end or without a file.

    Of one that is shorter none: its writer took back what a full disk did not take, and the rest was read before.
    `chunk_bytes`: read about so many bytes, at least one line; None: to the end.
    """
    try:
        with open(path, "rb") as file:
            if offset > file.seek(0, os.SEEK_END):
                return []
            file.seek(offset)
            raw = file.read(-1 if chunk_bytes is None else chunk_bytes)
            while chunk_bytes is not None and b"\n" not in raw and (more := file.read(chunk_bytes)):
                raw += more
    except FileNotFoundError:
        return []
    lines, end = [], offset
    for line in raw.split(b"\n")[:-1]:
        end += len(line) + 1
        lines.append(Line(line, end))
    return lines


def headline(metrics: dict[str, float]) -> dict[str, float]:
    """An epoch's validation numbers under the names of a stage's final numbers."""
    same = ("top1_pct", "top5_pct", "linear_top1_pct", "cka", "cosine", "raw_top1_pct", "raw_cka", "raw_cosine", "raw_loss")
    names = {"val/loss": "val_loss", **{f"val/{name}": name for name in same}}
    return {names[name]: value for name, value in metrics.items() if name in names}


def final_names(metrics: dict[str, float]) -> dict[str, float]:
    """All numbers of an epoch's record under the names of a stage's final numbers: `epoch/step_s` as `step_s`."""
    return {name.removeprefix("epoch/"): value for name, value in metrics.items()} | headline(metrics)


class _RelativePath:
    """A path below the root of a directory."""

    def __init__(self, *parts: str) -> None:
        self._parts = parts

    def __get__(self, directory: StageDir | RunDir | None, owner: type) -> Path:
        if directory is None:
            raise AttributeError("a path of a directory, not of its class")
        return directory.root.joinpath(*self._parts)


@dataclass(frozen=True)
class StageDir:
    """A stage of a run: one model's training, a cache's filling, or one measurement of a trial."""

    root: Path

    last = _RelativePath("checkpoints", "last.safetensors")
    best = _RelativePath("checkpoints", "best.safetensors")
    log = _RelativePath("logs", "train.log")
    """The plain lines that rank 0 and the driver print."""
    heartbeats = _RelativePath("heartbeats.json")
    """Where each rank is, every few seconds: {"version", "time_ms", "ranks": [{"rank", "at", "age_s"}]}."""
    stacks = _RelativePath("logs", "hangs.txt")
    """Each hang with the stacks of all threads of all ranks."""

    @property
    def init(self) -> StageDir:
        """The folder of its methods' init stage, where they have one."""
        return StageDir(Path(f"{self.root}-init"))


@dataclass(frozen=True)
class RunDir:
    """One run, or one trial of a sweep, or a sweep."""

    root: Path

    experiment = _RelativePath("experiment.yaml")
    events = _RelativePath("events.jsonl")
    """The run's log: what has happened in it, see `service.runs.events`."""
    result = _RelativePath("result.json")
    """A snapshot of what the log says, for people and scripts."""
    report = _RelativePath("report.html")
    """The run as one HTML page."""
    logs = _RelativePath("logs")
    tune = _RelativePath("ray")
    """Ray Tune's and Ray Train's own storage."""
    trials = _RelativePath("trials")
    methods = _RelativePath("methods")
    """Copies of the method files that the experiment names."""
    methods_index = _RelativePath("methods", "index.json")
    """Which file each copy is of, and its hash."""

    def stage(self, name: str) -> StageDir:
        return StageDir(self.root / name)

    def measurement(self, number: int) -> StageDir:
        """A measurement of a trial, counted from 0: a timing run of its student."""
        return self.stage("student" if number == 0 else f"student-{number + 1}")

    def trial(self, trial_id: str) -> RunDir:
        return RunDir(self.trials / trial_id)
