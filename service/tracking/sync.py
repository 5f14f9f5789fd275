"""Sends a run's log to MLflow, in order and each metric once.

A tag on each MLflow run, written after the metrics, names the last event that was sent. Later events may have arrived too; they
are sent again with the log's time, value and step, which MLflow treats as the same row.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import shlex
import sys
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from service.config.uris import checked_uri
from service.tracking.run_view import KEY_TAG, LogView, OpenView, RefusedError, RunView, SyncState, lock_path, state_path
from service.tracking.stores import CLIENT_ENVIRONMENT
from trainables.errors import ExperimentError, first_line, first_three
from trainables.locks import try_lock
from trainables.redact import redact
from trainables.rundir import RunDir

if TYPE_CHECKING:
    from service.tracking.mlflow_store import Row, Store

log = logging.getLogger("raydistill")

MAX_WAIT_S = 15.0
REQUEST_TIMEOUT_S = "60"
POSITION_TAG = "raydistill.position"
MAX_ROWS_OF = {"params": 100, "tags": 100, "metrics": 800}
"""Rows of each kind in one log_batch: MLflow takes as many parameters and tags, and 1000 in all."""
FILES = ("artifact", "model")
MLFLOW_NAMES = {"raydistill.commit": "mlflow.source.git.commit"}
"""Tags that MLflow's pages expect under other names."""


class Delivery(NamedTuple):
    """Whether MLflow has all events of a run, and a line for the user."""

    is_complete: bool
    message: str


class _DeletedError(Exception):
    """A run or experiment is deleted in MLflow; the message says how to restore it."""


class _ChangedError(Exception):
    """MLflow has lost a run that it had: list its runs again, and read the log from its beginning."""


class _OutOfTimeError(Exception):
    """The deadline passed before all was sent."""


@dataclass
class _RemoteRun:
    """The state of an MLflow run when it was last listed or written."""

    run_id: str
    position: int = 0
    """Offset in the log up to which the run is sent."""
    status: str = "RUNNING"
    tags: dict[str, str] = field(default_factory=dict)
    params: set[str] | None = field(default_factory=set)
    """Names of the parameters that it has, or None once this process has sent all of them."""
    is_deleted: bool = False


class Syncer:
    """Sends one log to one store. The caller holds the run's sync lock. `name` is the run directory as the user wrote it."""

    def __init__(self, run_dir: RunDir, uri: str, experiment: str, open_view: OpenView, name: str = "") -> None:
        """Raises OSError: the run directory cannot be read."""
        self._run_dir, self._open_view, self._name = run_dir, open_view, name or str(run_dir.root)
        self.state = SyncState.of(run_dir, uri, experiment)
        self._view: LogView | None = None
        self._store: Store | None = None
        self._known: dict[str, _RemoteRun] = {}
        """By the keys of the view's runs."""
        self._may_have_duplicates = False
        """Whether creating a run failed: MLflow may still carry out that request, after its repetition."""
        self._trouble, self._upload_trouble = "", ""
        self._refused = defaultdict[str, set[Any]](set)
        """Values that MLflow rejects for good, by reason."""
        self._until_s = math.inf
        self._is_complete = False

    def try_sync(self, *, is_last: bool = False, until_s: float = math.inf) -> bool:
        """Send all new events of the log. Returns whether MLflow took all of them.

        Raises nothing: if the store is down, busy or misconfigured, try again later; each outage is logged once. If it only
        rejects files, all else is sent. `is_last` says that the files that a run writes at its end are complete. No request
        begins after `until_s` of the monotonic clock.
        """
        self._until_s, self._is_complete, self._upload_trouble = until_s, False, ""
        try:
            trouble = self._sync(is_last=is_last)
        except _OutOfTimeError:
            return False
        except Exception as error:
            self._view, trouble = None, self._denial(error) or f"{self._where} did not accept the events ({reason_of(error)})"
        if trouble and not self._trouble:
            log.warning("tracking: %s; unsent events stay in %s", trouble, self._run_dir.events)
        elif self._trouble and not trouble:
            log.info("tracking: %s accepts events again", self._where)
        self._trouble, self._is_complete = trouble, not trouble and not self._unsent()
        return not trouble

    def delivery(self) -> Delivery:
        """Say whether everything was sent, and what to do if not."""
        num = sum(map(len, self._refused.values()))
        but = f", except {num} that cannot be sent: {first_three(list(self._refused))}" if num else ""
        if self._is_complete:
            return Delivery(True, f"MLflow has every event ({self._where}){but}")
        left = self._trouble or f"{self._where} does not have every event yet"
        return Delivery(False, f"{left}{but}; later, run distill sync {shlex.quote(self._name)}")

    @property
    def _where(self) -> str:
        return redact(self.state.uri)

    def _denial(self, error: Exception) -> str:
        """Explain a rejected login or a forbidden experiment, which retrying does not fix; "" for other errors."""
        if not hasattr(error, "get_http_status_code"):  # only MLflow's errors have it
            return ""
        status = error.get_http_status_code()
        if status not in (401, 403):
            return ""
        from service.tracking.server_check import denial

        return denial(status, self.state.uri, self.state.experiment, f"HTTP {status}")

    def _sync(self, *, is_last: bool) -> str:
        """Send all new events. Returns why some of them could not be sent, or ""."""
        store = self._store or self._connect()
        try:
            deleted = self._read_and_send(store, is_last=is_last)
        except _ChangedError:
            self._view = None
            return self._sync(is_last=is_last)
        if deleted:  # list the runs again in the next try
            self._view = None
            return first_three(deleted)
        if self._upload_trouble:
            num = sum(item.kind in FILES for run in self._unsent() for item in run.items)
            return f"{self._where} has the metrics but lacks {num} artifact{'s' * (num > 1)}: {self._upload_trouble}"
        if is_last and self._may_have_duplicates and self._view is not None:
            self._known = self._list_runs(store, self._view)
        return ""

    def _connect(self) -> Store:
        os.environ.update(CLIENT_ENVIRONMENT)
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", REQUEST_TIMEOUT_S)
        from service.tracking.mlflow_store import Store

        self._store = Store(self.state.uri, self.state.experiment, self._run_dir.root)
        self.state.experiment_id = self._store.experiment_id
        return self._store

    def _read_and_send(self, store: Store, *, is_last: bool) -> list[str]:
        """Read the rest of the log and send it in parts. Returns a line per deleted run that says how to restore it."""
        deleted = dict[str, None]()
        if (view := self._view) is None:
            view = self._open_view(self._run_dir)
            if not view.read():
                return []
            self._view, self._known = view, self._list_runs(store, view)
        while True:
            for run in self._unsent():
                if time.monotonic() > self._until_s:
                    raise _OutOfTimeError
                has_files = is_last or run.parent is not None or run.status == "RUNNING"  # else its page is not written yet
                try:
                    self._send(store, view, run, has_files=has_files)
                except _DeletedError as error:
                    deleted[str(error)] = None
            if not self._unsent() and view.end != self.state.position:
                self.state.position = view.end
                self.state.write(self._run_dir)
            if not view.read():
                return list(deleted)

    def _unsent(self) -> list[RunView]:
        runs = [] if self._view is None else self._view.runs.values()
        return [run for run in runs if run.key not in self._known or run.changed > self._known[run.key].position]

    def _list_runs(self, store: Store, view: LogView) -> dict[str, _RemoteRun]:
        """List the log's runs in MLflow by key. Of duplicates, the one that is behind is deleted."""
        found, known = [], dict[str, _RemoteRun]()
        for run in store.find_runs(view.id):
            info, tags = run.info, dict(run.data.tags)
            position = view.offset_of(tags.get(POSITION_TAG, ""))
            each = _RemoteRun(info.run_id, position, info.status, tags, set(run.data.params), info.lifecycle_stage != "active")
            found.append((tags[KEY_TAG].removeprefix(f"{view.id}/"), each))
        for key, each in sorted(found, key=lambda one: (one[1].is_deleted, -one[1].position)):
            if known.setdefault(key, each) is not each and not each.is_deleted:
                store.delete_run(each.run_id)
        return known

    def _send(self, store: Store, view: LogView, run: RunView, *, has_files: bool) -> None:
        """Send what is new in a run: metrics, then its files if `has_files`, its status, and last its position."""
        known = self._known.get(run.key) or self._create(store, view, run)
        if known.is_deleted:
            raise _DeletedError(self._why_deleted(store, run, known))
        while run.items and run.items[0].end <= known.position:
            run.items.popleft()
        if run.changed <= known.position:
            return
        self._log(store, run, known)
        if has_files:
            self._send_files(store, view, run, known)
        if run.status != known.status:
            self._request(store, run, "status", lambda: store.set_status(known.run_id, run.status, run.ended_ms))
            known.status = run.status
        if run.items:  # pending files: keep the old position, from which another process would have to send again
            return
        position: Row = ("tags", (POSITION_TAG, run.mark))
        self._request(store, run, "position", lambda: store.log(known.run_id, [position]))
        known.position = run.changed

    def _create(self, store: Store, view: LogView, run: RunView) -> _RemoteRun:
        parent = self._known[run.parent] if run.parent else None
        if parent is not None and parent.is_deleted:
            raise _DeletedError(self._why_deleted(store, view.runs[str(run.parent)], parent))
        try:
            run_id = store.create_run(f"{view.id}/{run.key}", run.name, parent.run_id if parent else None, run.began_ms)
        except Exception:
            self._may_have_duplicates = True
            raise
        self._known[run.key] = _RemoteRun(run_id)
        return self._known[run.key]

    def _why_deleted(self, store: Store, run: RunView, known: _RemoteRun) -> str:
        again = f"distill sync {shlex.quote(self._name)}"
        if store.is_experiment_deleted():
            return f"experiment {store.experiment!r} was deleted in MLflow: {again} restores it, with its runs"
        return f"run {known.run_id} ({run.key}) was deleted in MLflow: restore it there, then {again}"

    def _request(self, store: Store, run: RunView, what: str, request: Callable[[], Any]) -> None:
        """Make a request, skipping what MLflow rejects for good. Raises _ChangedError: see `_skip`."""
        try:
            request()
        except RefusedError as refusal:
            self._skip(store, run, (what,), refusal)

    def _skip(self, store: Store, run: RunView, what: tuple[Any, ...], refusal: RefusedError) -> None:
        """Count a rejected value. Raises _ChangedError: it was rejected because the run no longer exists."""
        if not store.is_active(self._known[run.key].run_id):
            raise _ChangedError
        reason = first_line(refusal)
        if reason not in self._refused:
            log.warning("tracking: skipped %s of %s: %s", redact(what[0]), run.key, redact(reason))
        self._refused[reason].add((run.key, what))

    def _log(self, store: Store, run: RunView, known: _RemoteRun) -> None:
        """Send the metrics, and the parameters and tags that MLflow lacks."""
        tags = run.tags | {MLFLOW_NAMES[name]: run.tags[name] for name in run.tags.keys() & MLFLOW_NAMES.keys()}
        params = {} if known.params is None else run.params()  # in MLflow a parameter cannot change
        rows: dict[str, list[Row]] = {
            "params": [("params", item) for item in params.items() if item[0] not in (known.params or ())],
            "tags": [("tags", item) for item in tags.items() if known.tags.get(item[0]) != item[1]],
            "metrics": [("metrics", item.value) for item in run.items if item.kind == "metrics"],
        }
        while part := [row for kind, each in rows.items() for row in each[: MAX_ROWS_OF[kind]]]:
            self._log_part(store, run, known, part)
            rows = {kind: each[MAX_ROWS_OF[kind] :] for kind, each in rows.items()}
        known.params, known.tags = None, tags
        run.items = deque(item for item in run.items if item.kind != "metrics")

    def _log_part(self, store: Store, run: RunView, known: _RemoteRun, part: list[Row]) -> None:
        """Send rows in one request. If it is rejected, send its halves, until each rejected row is found and skipped."""
        try:
            store.log(known.run_id, part)
        except RefusedError as refusal:
            if len(part) == 1:
                self._skip(store, run, part[0][1], refusal)
                return
            for half in (part[: len(part) // 2], part[len(part) // 2 :]):
                self._log_part(store, run, known, half)

    def _send_files(self, store: Store, view: LogView, run: RunView, known: _RemoteRun) -> None:
        """Send a run's files and other objects. After one file fails no more are tried: the server may have no artifact store."""
        requests: dict[str, Callable[[Any], None]] = {
            "dataset": lambda dataset: store.log_dataset(known.run_id, dataset),
            "views": lambda views: self._add_views(store, views),
            "artifact": lambda path: store.log_artifact(known.run_id, path),
            "model": lambda path: store.log_model(
                known.run_id, view.checkpoint(path), f"{view.id}/{run.key}", view.registered_model
            ),
        }
        for item in list(run.items):
            is_file = item.kind in FILES
            if is_file and self._upload_trouble:
                continue
            try:
                what = Path(item.value).name if is_file else item.kind
                self._request(store, run, what, partial(requests[item.kind], item.value))
            except Exception as error:
                if not is_file or isinstance(error, _ChangedError):
                    raise
                self._upload_trouble = reason_of(error)
                continue
            run.items.remove(item)

    def _add_views(self, store: Store, views: dict[str, str]) -> None:
        if reason := store.add_views(views):
            log.warning("tracking: %s has no saved views of the trials: %s", self._where, reason)
        else:
            self.state.views = list(views)


class Syncing:
    """Sends the log of a run in progress to MLflow from a thread. Only `close` waits for it."""

    def __init__(
        self, run_dir: RunDir, uri: str, experiment: str, open_view: OpenView, name: str = "", poll_s: float = 5.0
    ) -> None:
        """The log is read every `poll_s` seconds; a longer interval means fewer, larger requests. For `name` see `Syncer`.

        Raises:
            ExperimentError: MLflow cannot write to the URI.
            OSError: the run directory cannot be written.
        """
        self._syncer = Syncer(run_dir, checked_uri(uri), experiment, open_view, name)
        self._run_dir = run_dir
        if not state_path(run_dir).exists():  # later runs use it to find what this one could not send
            self._syncer.state.write(run_dir)
        self._lock_path, self._poll_s = lock_path(run_dir), poll_s
        self._closing, self._abandoned = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="tracking", daemon=True)

    def start(self) -> None:
        """Start sending; repeated calls do nothing. The import of MLflow occupies a core for seconds.

        Call it after this process's own heavy imports: two threads that import the same packages can fail.
        """
        if self._thread.ident is None:
            self._thread.start()

    def close(self, timeout_s: float) -> Delivery:
        """Send the rest of the log, for at most `timeout_s`. What is left can be sent later."""
        self._closing.set()
        self.start()
        self._thread.join(timeout_s)
        self._abandoned.set()
        self._thread.join(0.5)  # lets a current request finish, and release the lock for another process
        return self._syncer.delivery()

    def _run(self) -> None:
        if sys.platform == "linux":
            # Training has priority, also on a cluster, where Ray gives workers niceness 15. On Linux niceness is per thread.
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        while (lock := try_lock(self._lock_path)) is None:
            if self._abandoned.wait(1.0):
                return
        try:
            with contextlib.suppress(OSError):  # each sync writes it again, and reports errors
                self._syncer.state.write(self._run_dir)
            self._sync_until_closed()
        finally:
            lock.release()

    def _sync_until_closed(self) -> None:
        num_failures = 0
        while not self._abandoned.is_set():
            is_last = self._closing.is_set()
            if self._syncer.try_sync(is_last=is_last):
                if is_last:
                    return
                num_failures = 0
                self._closing.wait(self._poll_s)
            else:
                num_failures += 1
                wait_s = min(MAX_WAIT_S, 0.5 * 2 ** min(num_failures, 10))
                _ = self._abandoned.wait(min(wait_s, 1.0)) if is_last else self._closing.wait(wait_s)


def sync(
    run_dir: RunDir,
    uri: str,
    experiment: str,
    open_view: OpenView,
    *,
    name: str = "",
    max_failures: int = 3,
    until_s: float = math.inf,
) -> Delivery:
    """Send a run's log to MLflow now. Gives up after `max_failures` tries. For `name` and `until_s` see `Syncer`.

    Raises:
        ExperimentError: MLflow cannot write to the URI.
        OSError: the run directory cannot be read.
    """
    uri = checked_uri(uri)
    if (lock := try_lock(lock_path(run_dir))) is None:
        return Delivery(False, f"another process is sending the events of {name or run_dir.root} right now")
    try:
        syncer = Syncer(run_dir, uri, experiment, open_view, name)
        if syncer.state.is_sent(run_dir):
            return Delivery(True, f"MLflow has every event ({redact(uri)})")
        for attempt in range(1, max_failures + 1):
            if syncer.try_sync(is_last=True, until_s=until_s):
                break
            if attempt < max_failures:
                time.sleep(2**attempt)
    finally:
        lock.release()
    return syncer.delivery()


def sync_pending_runs(
    runs_root: Path, finished: RunDir, uri: str, open_view: OpenView, limit_s: float
) -> tuple[list[Path], list[Path]]:
    """Send pending events of earlier runs under the root, for `limit_s`, after `finished` has reached its store at `uri`.

    Only runs of the same store are tried, once each; unreadable ones are logged. Returns the directories that were sent, and
    those for which there was no time.
    """
    until_s = time.monotonic() + limit_s
    sent, left = list[Path](), list[Path]()
    for folder in sorted(path.parent for path in runs_root.glob("*/.mlflow.json")):
        run_dir = RunDir(folder)
        try:
            state = SyncState.read(run_dir)
            if folder == finished.root or state is None or state.uri != uri or state.is_sent(run_dir):
                continue
            in_time = time.monotonic() < until_s
            if in_time and sync(run_dir, uri, state.experiment, open_view, max_failures=1, until_s=until_s).is_complete:
                sent.append(folder)
            elif time.monotonic() >= until_s:
                left.append(folder)
        except (OSError, ExperimentError) as error:
            log.warning("tracking: the log of %s cannot be read: %s", folder, error)
    return sent, left


def reason_of(error: Exception) -> str:
    """Describe why a request failed, in one line without secrets."""
    return redact(first_line(root_cause(error)))[:200]


def root_cause(error: BaseException) -> BaseException:
    """Return the innermost error, such as one of a socket or SQLite, below those that only name the request."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return error
