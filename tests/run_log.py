"""Logs of runs as tests write and read them."""

import json
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from service.config.experiment import Resolved
from service.report import end_of_run
from service.runs.display import Display
from service.runs.driver_log import DriverLog
from service.runs.event_log import EventLog
from service.runs.events import Event, event, first_event, to_line
from service.runs.result import RunResult
from service.runs.run_log import RunLog, as_json, read_log
from service.runs.session import Session
from service.tracking.sync import Syncing
from trainables.rundir import RunDir
from trainables.worker.recorder import RunRecorder


class LocalRecorder(RunRecorder):
    """The recorder of a log that this process writes itself."""

    def __init__(self, root: Path, file: EventLog | None = None, attempt: int | None = None) -> None:
        super().__init__(file or EventLog(root / "events.jsonl"), str(root), attempt)
        object.__setattr__(self, "_pool", ThreadPoolExecutor(1))
        object.__setattr__(self, "_failures", list[Exception]())

    def begin_attempt(self, folder: Path) -> RunRecorder:
        return self

    def send(self, kind: str, folder: Path, **fields: Any) -> Callable[[], None]:
        made = {"kind": kind, "stage": self.stage(folder), "time_ms": time.time_ns() // 1_000_000} | fields
        written: Future[None] = self._pool.submit(self._append, made)  # type: ignore[attr-defined]
        return written.result

    def _append(self, made: Event) -> None:
        """Write one event, but none after one that could not be written, as `trainables.worker.recorder.Outbox` does."""
        failures: list[Exception] = self._failures  # type: ignore[attr-defined]
        if failures:
            raise failures[0]
        try:
            self.actor.append([made], self.attempt)
        except Exception as error:
            failures.append(error)
            raise

    def record(self, events: Iterable[Event]) -> None:
        self.actor.append(list(events))

    def check_attempt(self, folder: Path) -> None:
        if self.attempt is not None:
            self.actor.check_attempt(self.stage(folder), self.attempt)

    def of(self, key: str) -> list[Event]:
        found: list[Event] = self.actor.of(key)
        return found

    def text(self, path: Path, text: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a", encoding="utf-8") as file:
            file.write(text)


def session_of(resolved: Resolved, run_dir: RunDir, display: Display, syncing: Syncing | None = None) -> Session:
    """The session of a sweep whose log this process writes, as if Ray ran."""
    begun = {"kind": "sweep", "name": "digits", "status": "running", "runs_root": str(run_dir.root.parent)}
    write_log(run_dir, begun)
    log, found = DriverLog(run_dir.events), read_log(run_dir)
    log._recorder = LocalRecorder(run_dir.root, log._file)
    display.watch(run_dir.events, found.end)
    display._readers.append(found.fold.take)
    return Session(resolved, run_dir, display, end_of_run, syncing, log, found.fold)


def write_log(run_dir: RunDir, result: Mapping[str, Any] | RunResult, *events: Event) -> None:
    """Write a log that comes to this result, in place of another; `events` are behind it."""
    changes = as_json(result) if isinstance(result, RunResult) else dict(result)
    run_dir.root.mkdir(parents=True, exist_ok=True)
    run_dir.events.write_bytes(b"".join(map(to_line, [first_event(), event("result", changes=changes), *events])))


def add(run_dir: RunDir, *events: Event) -> None:
    """Append events to a log, whoever writes it."""
    run_dir.root.mkdir(parents=True, exist_ok=True)
    if not run_dir.events.exists():
        events = (event("log", version=1, id="test"), *events)
    with open(run_dir.events, "ab") as file:
        file.write(b"".join(map(to_line, events)))


def result_of(run_dir: RunDir) -> RunResult:
    """What the log of a run comes to."""
    return read_log(run_dir).result


def change(run_dir: RunDir, **changes: Any) -> None:
    """Record changes of a run's result, as JSON has them."""
    add(run_dir, event("result", changes=json.loads(json.dumps(changes))))


def numbers(kind: str, stage: str, step: int, epoch: float = 0.0, time_ms: int | None = None, **metrics: float) -> Event:
    """An event with numbers."""
    made = event(kind, stage, step=step, epoch=float(epoch), metrics=metrics)
    return made if time_ms is None else made | {"time_ms": time_ms}


def events_of(folder: Path, *kinds: str) -> list[Event]:
    """The events of a stage by its folder, which lies in its run's or its trial's; [] before there is a log."""
    for root in (folder, *folder.parents):
        if (root / "events.jsonl").exists():
            return RunLog(root / "events.jsonl").of_stage(str(folder.relative_to(root)), *kinds)
    return []
