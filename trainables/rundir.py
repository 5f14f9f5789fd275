"""The paths of a run directory, and atomic, durable writes to them."""

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
"""How long a node may see an older file than its writer; NFS caches folder entries for a minute (`acdirmax`)."""


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path next to `path` to write to, and at the end fsync it and rename it to `path`.

    Readers see either the old file or the new one, even after a crash. Raises OSError: the disk is full or the folder cannot be
    written; the old file is then unchanged.
    """
    # The name is random rather than the PID, which may be the same on two nodes that share the disk.
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
    """Remove temporary files that killed writes of `path` left behind. Only the file's single writer may call this."""
    for temporary in path.parent.glob(f".{path.name}.*.tmp"):
        temporary.unlink(missing_ok=True)


def expand_home(path: str | Path) -> Path:
    """Expand `~` or `~USER` at the beginning of `path`. Raises ExperimentError: there is no such user."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ExperimentError(f"{path}: this machine has no home folder {Path(path).parts[0]}: write the full path") from error


def unwritable_reason(folder: Path) -> str | None:
    """Return why `folder`, which may not exist yet, cannot be written, or None if it can."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if os.path.exists(path))
    if not existing.is_dir():
        return f"{existing} is not a folder"
    return None if os.access(existing, os.W_OK | os.X_OK) else f"{existing} is read-only for you"


def create_private(folder: Path) -> None:
    """Create a folder that only its user can enter; an existing one keeps its mode."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def fsync_directory(path: Path) -> None:
    """Make a rename inside `path` durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_text(path: Path, text: str) -> None:
    """Replace `path` with `text`, with secrets in URIs redacted; see `replacing`. Names of files keep their bytes."""
    write_atomic(path, redact_uris(text).encode(errors="surrogateescape"))


def write_json(path: Path, value: Any) -> None:
    """Replace `path` with `value` as indented JSON, with secrets in URIs redacted; see `replacing`."""
    write_atomic(path, (json.dumps(redact_values(value), indent=2) + "\n").encode())


class Line(NamedTuple):
    """A complete line of a file of JSON lines."""

    raw: bytes
    end: int
    """Byte offset after the line."""

    @property
    def record(self) -> dict[str, Any] | None:
        """The line's JSON object, or None, for example if a kill cut the line off and a later writer ended it."""
        try:
            record = json.loads(self.raw)
        except ValueError:
            return None
        return record if isinstance(record, dict) else None


def lines_after(path: Path, offset: int, chunk_bytes: int | None = None) -> list[Line]:
    """Return the complete lines of a growing file after byte `offset`; [] at its end or if there is no file.

    It is also [] if the file is shorter than `offset`: its writer took back a line that did not fit on the disk. With
    `chunk_bytes`, read about so many bytes, but at least one line; None reads to the end.
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
    """Select an epoch's validation metrics, renamed to a stage's final metrics."""
    same = ("top1_pct", "top5_pct", "linear_top1_pct", "cka", "cosine", "raw_top1_pct", "raw_cka", "raw_cosine", "raw_loss")
    names = {"val/loss": "val_loss", **{f"val/{name}": name for name in same}}
    return {names[name]: value for name, value in metrics.items() if name in names}


def final_names(metrics: dict[str, float]) -> dict[str, float]:
    """Rename all metrics of an epoch's record to a stage's final metrics: `epoch/step_s` to `step_s`."""
    return {name.removeprefix("epoch/"): value for name, value in metrics.items()} | headline(metrics)


class _RelativePath:
    """A path below the root of a directory."""

    def __init__(self, *parts: str) -> None:
        self._parts = parts

    def __get__(self, directory: StageDir | RunDir | None, owner: type) -> Path:
        if directory is None:
            raise AttributeError("only an instance of the directory class has this path")
        return directory.root.joinpath(*self._parts)


@dataclass(frozen=True)
class StageDir:
    """The folder of a stage: training of one model, filling of a cache, or one measurement of a trial."""

    root: Path

    last = _RelativePath("checkpoints", "last.safetensors")
    best = _RelativePath("checkpoints", "best.safetensors")
    log = _RelativePath("logs", "train.log")
    """The text log of rank 0 and the driver."""
    heartbeats = _RelativePath("heartbeats.json")
    """Each rank's position, updated every few seconds: {"version", "time_ms", "ranks": [{"rank", "at", "age_s"}]}."""
    stacks = _RelativePath("logs", "hangs.txt")
    """Each hang, with the stacks of all threads of all ranks."""

    @property
    def init(self) -> StageDir:
        """The folder of the methods' init stage, if they have one."""
        return StageDir(Path(f"{self.root}-init"))


@dataclass(frozen=True)
class RunDir:
    """The directory of a run, a sweep, or one trial of a sweep."""

    root: Path

    experiment = _RelativePath("experiment.yaml")
    events = _RelativePath("events.jsonl")
    """The run's event log, see `service.runs.events`."""
    result = _RelativePath("result.json")
    """A snapshot of the log's results, for people and scripts."""
    report = _RelativePath("report.html")
    """The run as one HTML page."""
    logs = _RelativePath("logs")
    tune = _RelativePath("ray")
    """Ray Tune's and Ray Train's own storage."""
    trials = _RelativePath("trials")
    batch_size = _RelativePath("batch-size")
    """The run of the timing sweep that has decided `data.global_batch_size: auto`."""
    methods = _RelativePath("methods")
    """Copies of the method files that the experiment names."""
    methods_index = _RelativePath("methods", "index.json")
    """The original file and hash of each copy."""

    def stage(self, name: str) -> StageDir:
        return StageDir(self.root / name)

    def measurement(self, number: int) -> StageDir:
        """Return the folder of a trial's measurement (a timing run of its student), numbered from 0."""
        return self.stage("student" if number == 0 else f"student-{number + 1}")

    def trial(self, trial_id: str) -> RunDir:
        return RunDir(self.trials / trial_id)
