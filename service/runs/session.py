"""The session of a run or sweep: its lock, display, records and `result.json`, from its beginning to its end, however it ends."""

import contextlib
import json
import shlex
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol, TypeVar

from rich.console import RenderableType

import service
from service.cluster.local_ray import RayLostError
from service.config.experiment import Resolved
from service.config.schema import Experiment
from service.runs.display import Display, wait_for
from service.runs.driver_log import DriverLog
from service.runs.mlflow_view import MlflowView
from service.runs.result import MlflowTarget, RunResult, write_result
from service.runs.run_directory import locked_run, runs_root_of
from service.runs.run_log import ResultFold, as_json, read_log
from service.runs.stored.driver_lease import LeaseLostError
from service.runs.stored.segments import LogStore
from service.runs.stored.stored_runs import display_name, uri_of
from service.runs.stored.stored_session import ENDING_S, stored_session
from service.tracking import Syncing, default_uri, sync_neighbours
from trainables.config import DataIdentity
from trainables.data.identity import data_changes
from trainables.errors import StorageError
from trainables.rundir import RunDir

T = TypeVar("T")
FLUSH_S, NEIGHBOURS_S = 30.0, 10.0
"""How long the end of a run waits for MLflow; what it did not take by then is sent later."""


class ResultReporter(Protocol):
    """How a result is shown. Commands give `service.report.end_of_run`, which runs and sweeps do not know."""

    def tables(self, result: RunResult) -> Sequence[RenderableType]:
        """What the terminal shows at the end of a run or sweep: tables, and lines as text."""

    def verdict(self, result: RunResult) -> Sequence[str]:
        """Which trial of a sweep won and why, in sentences."""

    def write_page_at_end(self, run_dir: RunDir, result: RunResult, echo: Callable[[str], None]) -> None:
        """Write `report.html`; what goes wrong is logged, and raises nothing."""


@dataclass
class Session:
    """A run or sweep being carried out: where it is written, who watches, who records."""

    resolved: Resolved
    run_dir: RunDir
    display: Display
    reporter: ResultReporter
    syncing: Syncing | None
    log: DriverLog
    fold: ResultFold
    """What the log says so far, as far as `display` has read it."""

    @property
    def experiment(self) -> Experiment:
        return self.resolved.experiment

    @property
    def result(self) -> RunResult:
        """The same, typed."""
        return self.fold.result(self.run_dir.events)

    def save(self, **changes: Any) -> None:
        """Record fields of the result that have changed, and write `result.json`."""
        result, names = self.result.model_copy(update=changes), changes.keys() - {"trials"}
        values = result.model_dump(mode="json", by_alias=True, include=names, warnings=False)
        changed = {name: value for name, value in values.items() if value != self.fold.fields.get(name)}
        rows = [row for row in map(as_json, changes.get("trials", ())) if _text(row) != _text(self.fold.rows.get(row["id"]))]
        if rows or ("trials" in changes and "trials" not in self.fold.fields):
            changed["trials"] = rows
        if changed:
            self.record("result", changes=changed)
        self.write_snapshot()

    def record(self, kind: str, stage: str | None = None, **fields: Any) -> None:
        """Write an event. Raises as `DriverLog.record` does."""
        self.log.record(kind, stage, **fields)
        self.display.read_events()

    def write_snapshot(self) -> None:
        """Write `result.json`, atomically, with the seconds so far."""
        seconds = self.fold.seconds(time.time_ns() // 1_000_000)
        write_result(self.run_dir.result, self.result.model_copy(update={"seconds": seconds}))

    def wait_for(self, work: Callable[[], T], tick: Callable[[], None] = lambda: None) -> T:
        return wait_for(work, self.display, tick)

    def show_result(self) -> None:
        """The tables and sentences of the result as it stands, on the terminal."""
        for part in self.reporter.tables(self.result):
            if isinstance(part, str):
                self.display.print(part)
            else:
                self.display.console.print(part)


@contextlib.contextmanager
def open_session(
    resolved: Resolved, run_dir: RunDir, reporter: ResultReporter, data: DataIdentity | None = None
) -> Iterator[Session]:
    """Open the display and the records around a run; however it ends, `result.json` and MLflow say how.

    `data`: what it is trained on from now on, see `RunResult.data`.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(locked_run(run_dir))
        display = stack.enter_context(Display())
        place = stack.enter_context(stored_session(run_dir, display.print))
        session = stack.enter_context(_opened(resolved, run_dir, display, reporter, place))
        if data is not None and data != session.result.data:
            session.save(**with_data(session.result, data))
        display.print(f"{session.result.kind} {resolved.experiment.name} in {display_name(run_dir.root)}")
        if session.syncing and uri_of(run_dir.root) and not resolved.experiment.tracking.uri:
            store = runs_root_of(session.result)
            display.print(f"MLflow's store is on this machine, in {store}: set tracking.uri to a server to share it")
        try:
            yield session
        except BaseException as error:
            interrupted = isinstance(error, KeyboardInterrupt | RayLostError)
            status = "interrupted" if interrupted else "failed"
            session.log.wait_for_store(ENDING_S)
            # A full disk is the usual reason to be here, or a store that is gone: the error itself matters more.
            with contextlib.suppress(OSError, StorageError, LeaseLostError):
                _end(session, status, str(error))
            _close(session, status, 5.0)
            raise
        _end(session, "complete")
        _close(session, "complete", FLUSH_S)


def _end(session: Session, status: str, reason: str = "") -> None:
    if status == "complete":
        session.save(finished=datetime.now().isoformat(timespec="seconds"))
    session.record("session_ended", status=status, reason=reason)
    session.write_snapshot()


@contextlib.contextmanager
def _opened(
    resolved: Resolved, run_dir: RunDir, display: Display, reporter: ResultReporter, store: LogStore | None
) -> Iterator[Session]:
    with contextlib.closing(DriverLog(run_dir.events, store)) as log:
        found = read_log(run_dir)
        tracking, syncing, target = resolved.experiment.tracking, None, None
        if tracking.enabled:
            uri = tracking.uri or default_uri(runs_root_of(found.result))
            target = MlflowTarget(uri=uri, experiment=tracking.experiment)
            syncing = Syncing(run_dir, target.uri, target.experiment, MlflowView, display_name(run_dir.root))
        session = Session(resolved, run_dir, display, reporter, syncing, log, found.fold)
        display.watch(run_dir.events, found.end)
        with display.reading(found.fold.take):
            session.record("session_begun", tags=code_tags())
            session.save(mlflow=target)
            yield session


def with_data(result: RunResult, data: DataIdentity) -> dict[str, Any]:
    """What changes in the result of a run that goes on with other data, or whose data is not on record yet."""
    changes = data_changes(result.data, data) if result.data is not None else []
    lines = [f"resumed on other data: {', '.join(changes)}"] if changes else []
    return {"data": data, "not_exact": [*result.not_exact, *lines]}


def _close(session: Session, status: str, timeout_s: float) -> None:
    session.reporter.write_page_at_end(session.run_dir, session.result, session.display.print)
    if session.syncing is None:
        return
    delivery = session.syncing.close(timeout_s)
    session.display.print(delivery.message)
    # Of a run in an object store another machine may be the driver: its records here are a copy, which `distill sync` sends.
    if status == "complete" and delivery.is_complete and session.result.mlflow and uri_of(session.run_dir.root) is None:
        root, uri = runs_root_of(session.result), session.result.mlflow.uri
        sent, left = sync_neighbours(root, session.run_dir, uri, MlflowView, NEIGHBOURS_S)
        for folder in sent:
            session.display.print(f"MLflow was also sent the pending events of {folder}")
        if left:
            again = f"distill sync {shlex.quote(str(left[0]))}"
            session.display.print(f"events of earlier runs ({len(left)}) still wait for MLflow; later: {again}")


def start_tracking(session: Session) -> None:
    """Begin to send to MLflow: its import takes a core for seconds, which a run that is starting needs itself."""
    if session.syncing:
        session.syncing.start()


def code_tags() -> dict[str, str]:
    """Tags that say what code ran: the version, and the commit where that is a checkout."""
    tags = {"raydistill.version": version("raydistill")}
    checkout = Path(service.__file__).parents[1]
    if not (checkout / ".git").exists():  # an installed package, whose folder may lie in somebody else's checkout
        return tags
    try:
        command = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
        commit = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):  # no git, or none that answers: the tag is left out
        return tags
    if commit.returncode == 0:
        tags["raydistill.commit"] = commit.stdout.strip()
    return tags


def _text(row: dict[str, Any] | None) -> str:
    """A row as text, in which a NaN equals another."""
    return json.dumps(row, sort_keys=True)
