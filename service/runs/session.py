"""A session of a run or sweep: one driver process with the run's lock, display, log and `result.json`."""

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
from service.runs.stored.stored_runs import display_name, uri_of
from service.runs.stored.stored_session import ENDING_S, stored_session
from service.tracking.stores import default_uri
from service.tracking.sync import Syncing, sync_pending_runs
from trainables.config import DataIdentity
from trainables.data.identity import data_changes
from trainables.errors import StorageError
from trainables.rundir import RunDir

T = TypeVar("T")
FLUSH_S, MAX_FLUSH_S, PENDING_RUNS_S = 30.0, 300.0, 10.0
"""How long a run that ends waits for MLflow to take its own events and those of earlier runs."""


class ResultReporter(Protocol):
    """Shows a result. Commands pass `service.report.end_of_run`, which this package may not import."""

    def summary(self, run_dir: RunDir, result: RunResult) -> tuple[Sequence[RenderableType], list[str]]:
        """Return the tables and lines that end a run or sweep on the terminal, and those on which trial won and why."""

    def write_page_at_end(self, run_dir: RunDir, result: RunResult, echo: Callable[[str], None]) -> None:
        """Write `report.html`. Errors are logged, not raised."""


@dataclass
class Session:
    """A run or sweep in progress, with its directory, display and log."""

    resolved: Resolved
    run_dir: RunDir
    display: Display
    reporter: ResultReporter
    syncing: Syncing | None
    log: DriverLog
    fold: ResultFold
    """The state that follows from the events that `display` has read so far."""

    @property
    def experiment(self) -> Experiment:
        return self.resolved.experiment

    @property
    def result(self) -> RunResult:
        """The typed result as of `fold`."""
        return self.fold.result(self.run_dir.events)

    def save(self, **changes: Any) -> None:
        """Record the result's fields that changed, and write `result.json`."""
        result, names = self.result.model_copy(update=changes), changes.keys() - {"trials"}
        values = result.model_dump(mode="json", by_alias=True, include=names, warnings=False)
        changed = {name: value for name, value in values.items() if value != self.fold.fields.get(name)}
        rows = [row for row in map(as_json, changes.get("trials", ())) if _dumps(row) != _dumps(self.fold.rows.get(row["id"]))]
        if rows or ("trials" in changes and "trials" not in self.fold.fields):
            changed["trials"] = rows
        if changed:
            self.record("result", changes=changed)
        self.write_snapshot()

    def record(self, kind: str, stage: str | None = None, **fields: Any) -> None:
        """Write an event. Raises what `DriverLog.record` raises."""
        self.log.record(kind, stage, **fields)
        self.display.read_events()

    def write_snapshot(self) -> None:
        """Write `result.json` atomically, with the run time so far."""
        seconds = self.fold.seconds(time.time_ns() // 1_000_000)
        write_result(self.run_dir.result, self.result.model_copy(update={"seconds": seconds}))

    def wait_for(self, work: Callable[[], T], tick: Callable[[], None] = lambda: None) -> T:
        return wait_for(work, self.display, tick)

    def show_result(self) -> list[str]:
        """Print the current result's tables and sentences. Returns those on which trial of a sweep won and why."""
        parts, verdict = self.reporter.summary(self.run_dir, self.result)
        for part in parts:
            if isinstance(part, str):
                self.display.print(part)
            else:
                self.display.console.print(part)
        return verdict


@contextlib.contextmanager
def open_session(
    resolved: Resolved, run_dir: RunDir, reporter: ResultReporter, data: DataIdentity | None = None
) -> Iterator[Session]:
    """Open the display and the log for a run, and record in `result.json` and MLflow how the run ends.

    `data` identifies the data that the run trains on from now on, see `RunResult.data`.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(locked_run(run_dir))
        display = stack.enter_context(Display())
        store = stack.enter_context(stored_session(run_dir, display.print))
        log = stack.enter_context(contextlib.closing(DriverLog(run_dir.events, store)))
        found = read_log(run_dir)
        tracking, syncing, target = resolved.experiment.tracking, None, None
        if tracking.enabled:
            uri = tracking.uri or default_uri(runs_root_of(found.result))
            target = MlflowTarget(uri=uri, experiment=tracking.experiment)
            syncing = Syncing(run_dir, uri, tracking.experiment, MlflowView, display_name(run_dir.root))
        session = Session(resolved, run_dir, display, reporter, syncing, log, found.fold)
        display.watch(run_dir.events, found.end)
        stack.enter_context(display.reading(found.fold.take))
        session.record("session_begun", tags=code_tags())
        session.save(mlflow=target)
        if data is not None and data != session.result.data:
            session.save(**with_data(session.result, data))
        display.print(f"{session.result.kind} {resolved.experiment.name} in {display_name(run_dir.root)}")
        if session.syncing and uri_of(run_dir.root) and not resolved.experiment.tracking.uri:
            root = runs_root_of(session.result)
            display.print(f"MLflow's store is on this machine, in {root}: set tracking.uri to a server to share it")
        try:
            yield session
        except BaseException as error:
            interrupted = isinstance(error, KeyboardInterrupt | RayLostError)
            status = "interrupted" if interrupted else "failed"
            session.log.wait_for_store(ENDING_S)
            # Recording fails too if the cause is a full disk or a lost store; the original error matters more.
            with contextlib.suppress(OSError, StorageError, LeaseLostError):
                _end(session, status, str(error))
            _close(session, status, 5.0, 5.0)
            raise
        _end(session, "complete")
        _close(session, "complete", FLUSH_S, MAX_FLUSH_S)


def _end(session: Session, status: str, reason: str = "") -> None:
    if status == "complete":
        session.save(finished=datetime.now().isoformat(timespec="seconds"))
    session.record("session_ended", status=status, reason=reason)
    session.write_snapshot()


def with_data(result: RunResult, data: DataIdentity) -> dict[str, Any]:
    """Return the fields of the result that change when the run trains on `data` from now on."""
    changes = data_changes(result.data, data) if result.data is not None else []
    lines = [f"resumed on other data: {', '.join(changes)}"] if changes else []
    return {"data": data, "not_exact": [*result.not_exact, *lines]}


def _close(session: Session, status: str, timeout_s: float, max_s: float) -> None:
    session.reporter.write_page_at_end(session.run_dir, session.result, session.display.print)
    if session.syncing is None:
        return
    delivery = session.syncing.close(timeout_s, max_s)
    session.display.print(delivery.message)
    # A run in an object store is only copied here and another machine may drive it: `distill sync` sends its events.
    if status == "complete" and delivery.is_complete and session.result.mlflow and uri_of(session.run_dir.root) is None:
        root, uri = runs_root_of(session.result), session.result.mlflow.uri
        sent, left = sync_pending_runs(root, uri, MlflowView, PENDING_RUNS_S)
        for folder in sent:
            session.display.print(f"also sent MLflow the pending events of {folder}")
        if left:
            count, again = len(left), f"distill sync {shlex.quote(str(left[0]))}"
            session.display.print(f"earlier runs with events not yet sent to MLflow: {count}; run {again}")


def start_tracking(session: Session) -> None:
    """Start sending to MLflow. Call it late: importing MLflow occupies a core for seconds, which a starting run needs itself."""
    if session.syncing:
        session.syncing.start()


def code_tags() -> dict[str, str]:
    """Tags that identify the code: its version, and its commit if it runs from a checkout."""
    tags = {"raydistill.version": version("raydistill")}
    checkout = Path(service.__file__).parents[1]
    if not (checkout / ".git").exists():  # an installed package, whose folder may be inside an unrelated checkout
        return tags
    try:
        command = ["git", "-C", str(checkout), "rev-parse", "HEAD"]
        commit = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
    except (OSError, subprocess.TimeoutExpired):  # git is missing or hangs
        return tags
    if commit.returncode == 0:
        tags["raydistill.commit"] = commit.stdout.strip()
    return tags


def _dumps(row: dict[str, Any] | None) -> str:
    """Serialize a row for comparison: as text, NaN equals NaN."""
    return json.dumps(row, sort_keys=True)
