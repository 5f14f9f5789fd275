"""Makes MLflow equal to what a run's log says, in order and each metric once.

How far MLflow is, it knows itself: a tag on each of its runs names the event up to which it was sent, written after its metrics.
What lies behind is sent again with the time, value and step of the log, which MLflow takes as the same row.
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
"""Tags that MLflow's pages look for under names of their own."""


class Delivery(NamedTuple):
    """Whether MLflow has all of a run, and a line for the user."""

    is_complete: bool
    message: str


class _DeletedError(Exception):
    """MLflow takes nothing for a run or its experiment, until somebody does what the message says."""


class _ChangedError(Exception):
    """MLflow has not got any more what it had: it is asked again, and the log read again from its beginning."""


class _OutOfTimeError(Exception):
    """What is left was not sent, as the time for it had passed."""


@dataclass
class _Known:
    """A run of MLflow as it was last listed or written."""

    run_id: str
    position: int = 0
    """Offset up to which it has the log."""
    status: str = "RUNNING"
    tags: dict[str, str] = field(default_factory=dict)
    params: set[str] | None = field(default_factory=set)
    """None: this process has sent those that it lacked."""
    is_deleted: bool = False


class Syncer:
    """One log, one store. Whoever holds the run's lock calls it. `name`: the run directory as the user names it."""

    def __init__(self, run_dir: RunDir, uri: str, experiment: str, open_view: OpenView, name: str = "") -> None:
        """Raises OSError: the run directory cannot be read."""
        self._run_dir, self._open_view, self._name = run_dir, open_view, name or str(run_dir.root)
        self.state = SyncState.of(run_dir, uri, experiment)
        self._view: LogView | None = None
        self._store: Store | None = None
        self._known: dict[str, _Known] = {}
        """By key of the view's runs."""
        self._may_have_twins = False
        """Whether a creation was requested without an answer: MLflow may get to it later than to its repetition."""
        self._trouble, self._upload_trouble = "", ""
        self._refused = defaultdict[str, set[Any]](set)
        """Why values were left out that MLflow will never take, and which."""
        self._until_s = math.inf
        self._is_complete = False

    def try_sync(self, *, is_last: bool = False, until_s: float = math.inf) -> bool:
        """Send everything that the log has gained; False where MLflow did not take all of it.

        Nothing is raised: a store that is away, busy or misconfigured is a reason to try again later, logged once an outage.
        Where it only takes no files, everything else arrives. `is_last`: the files of the run's end are complete. `until_s`, of
        the monotonic clock: later nothing more is begun.
        """
        self._until_s, self._is_complete, self._upload_trouble = until_s, False, ""
        try:
            trouble = self._sync(is_last=is_last)
        except _OutOfTimeError:
            return False
        except Exception as error:
            self._view, trouble = None, self._denial(error) or f"{self._where} takes nothing now ({reason_of(error)})"
        if trouble and not self._trouble:
            log.warning("tracking: %s; what is left waits in %s", trouble, self._run_dir.events)
        elif self._trouble and not trouble:
            log.info("tracking: %s takes everything again", self._where)
        self._trouble, self._is_complete = trouble, not trouble and not self._unsent()
        return not trouble

    def delivery(self) -> Delivery:
        """How it went, and what to do about it."""
        num = sum(map(len, self._refused.values()))
        but = f", but for {num} that {'was' if num == 1 else 'were'} left out: {first_three(list(self._refused))}" if num else ""
        if self._is_complete:
            return Delivery(True, f"MLflow has every event ({self._where}){but}")
        left = self._trouble or f"{self._where} has not taken every event yet"
        return Delivery(False, f"{left}{but}; later: distill sync {shlex.quote(self._name)}")

    @property
    def _where(self) -> str:
        return redact(self.state.uri)

    def _denial(self, error: Exception) -> str:
        """Why the server refuses a login or an experiment, which time alone does not change; "" for another error."""
        if not hasattr(error, "get_http_status_code"):  # MLflow's errors have it
            return ""
        status = error.get_http_status_code()
        if status not in (401, 403):
            return ""
        from service.tracking.server_check import denial

        return denial(status, self.state.uri, self.state.experiment, f"HTTP {status}")

    def _sync(self, *, is_last: bool) -> str:
        """Send what there is; returns why MLflow did not take a part of it."""
        store = self._store or self._connect()
        try:
            deleted = self._read_and_send(store, is_last=is_last)
        except _ChangedError:
            self._view = None
            return self._sync(is_last=is_last)
        if deleted:  # to be looked up again by the next try
            self._view = None
            return first_three(deleted)
        if self._upload_trouble:
            num = sum(item.kind in FILES for run in self._unsent() for item in run.items)
            wait = f"{num} artifact{'s wait' if num > 1 else ' waits'}"
            return f"metrics are sent to {self._where}; {wait}: {self._upload_trouble}"
        if is_last and self._may_have_twins and self._view is not None:
            self._known = self._list(store, self._view)
        return ""

    def _connect(self) -> Store:
        os.environ.update(CLIENT_ENVIRONMENT)
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", REQUEST_TIMEOUT_S)
        from service.tracking.mlflow_store import Store

        self._store = Store(self.state.uri, self.state.experiment, self._run_dir.root)
        self.state.experiment_id = self._store.experiment_id
        return self._store

    def _read_and_send(self, store: Store, *, is_last: bool) -> list[str]:
        """Read the log on and send it, a part at a time. Returns which runs were deleted in MLflow, and what to do about it."""
        deleted = dict[str, None]()
        if (view := self._view) is None:
            view = self._open_view(self._run_dir)
            if not view.read():
                return []
            self._view, self._known = view, self._list(store, view)
        while True:
            for run in self._unsent():
                if time.monotonic() > self._until_s:
                    raise _OutOfTimeError
                has_files = is_last or run.parent is not None or run.status == "RUNNING"  # else its page is still being made
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

    def _list(self, store: Store, view: LogView) -> dict[str, _Known]:
        """What MLflow has of the log's runs. Of one that it has twice, that which is behind is deleted."""
        found, known = [], dict[str, _Known]()
        for run in store.find_runs(view.id):
            info, tags = run.info, dict(run.data.tags)
            position = view.offset_of(tags.get(POSITION_TAG, ""))
            each = _Known(info.run_id, position, info.status, tags, set(run.data.params), info.lifecycle_stage != "active")
            found.append((tags[KEY_TAG].removeprefix(f"{view.id}/"), each))
        for key, each in sorted(found, key=lambda one: (one[1].is_deleted, -one[1].position)):
            if known.setdefault(key, each) is not each and not each.is_deleted:
                store.delete_run(each.run_id)
        return known

    def _send(self, store: Store, view: LogView, run: RunView, *, has_files: bool) -> None:
        """Send what a run has gained: its metrics, then its files where it has them, its status, and how far it is."""
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
        if run.items:  # files that wait; everything behind the position is sent again by a process that does not know more
            return
        position: Row = ("tags", (POSITION_TAG, run.mark))
        self._request(store, run, "position", lambda: store.log(known.run_id, [position]))
        known.position = run.changed

    def _create(self, store: Store, view: LogView, run: RunView) -> _Known:
        parent = self._known[run.parent] if run.parent else None
        if parent is not None and parent.is_deleted:
            raise _DeletedError(self._why_deleted(store, view.runs[str(run.parent)], parent))
        try:
            run_id = store.create_run(f"{view.id}/{run.key}", run.name, parent.run_id if parent else None, run.began_ms)
        except Exception:
            self._may_have_twins = True
            raise
        self._known[run.key] = _Known(run_id)
        return self._known[run.key]

    def _why_deleted(self, store: Store, run: RunView, known: _Known) -> str:
        again = f"distill sync {shlex.quote(self._name)}"
        if store.is_experiment_deleted():
            return f"experiment {store.experiment!r} was deleted in MLflow: {again} restores it, with its runs"
        return f"run {known.run_id} ({run.key}) was deleted in MLflow: restore it there, then {again}"

    def _request(self, store: Store, run: RunView, what: str, request: Callable[[], Any]) -> None:
        """Carry out a request, or leave out what MLflow will never take. Raises _ChangedError."""
        try:
            request()
        except RefusedError as refusal:
            self._leave_out(store, run, (what,), refusal)

    def _leave_out(self, store: Store, run: RunView, what: tuple[Any, ...], refusal: RefusedError) -> None:
        """Count what was refused. Raises _ChangedError: it was, because the run is not there any more."""
        if not store.is_active(self._known[run.key].run_id):
            raise _ChangedError
        reason = first_line(refusal)
        if reason not in self._refused:
            log.warning("tracking: %s of %s is left out: %s", redact(what[0]), run.key, redact(reason))
        self._refused[reason].add((run.key, what))

    def _log(self, store: Store, run: RunView, known: _Known) -> None:
        """Send parameters and tags that MLflow lacks, and the metrics."""
        tags = run.tags | {MLFLOW_NAMES[name]: run.tags[name] for name in run.tags.keys() & MLFLOW_NAMES.keys()}
        params = {} if known.params is None else run.params()  # MLflow keeps the first value of each
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

    def _log_part(self, store: Store, run: RunView, known: _Known, part: list[Row]) -> None:
        """One request. Where it is refused: its halves, until what MLflow does not take stands alone and is left out."""
        try:
            store.log(known.run_id, part)
        except RefusedError as refusal:
            if len(part) == 1:
                self._leave_out(store, run, part[0][1], refusal)
                return
            for half in (part[: len(part) // 2], part[len(part) // 2 :]):
                self._log_part(store, run, known, half)

    def _send_files(self, store: Store, view: LogView, run: RunView, known: _Known) -> None:
        """Send the files of a run, until one fails: most likely the others would too. A server may have nowhere to put them."""
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
    """Keeps MLflow equal to the log of a run that is being carried out, in a thread. Nothing waits for it, but for `close`."""

    def __init__(
        self, run_dir: RunDir, uri: str, experiment: str, open_view: OpenView, name: str = "", poll_s: float = 5.0
    ) -> None:
        """`poll_s`: seconds between two looks at the log; longer means fewer and larger requests. `name`: see `Syncer`.

        Raises:
            ExperimentError: a URI that MLflow cannot write to.
            OSError: the run directory cannot be written.
        """
        self._syncer = Syncer(run_dir, checked_uri(uri), experiment, open_view, name)
        self._run_dir = run_dir
        if not state_path(run_dir).exists():  # by which later runs find what this one could not send
            self._syncer.state.write(run_dir)
        self._lock_path, self._poll_s = lock_path(run_dir), poll_s
        self._closing, self._abandoned = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="tracking", daemon=True)

    def start(self) -> None:
        """Begin to send, once. MLflow's import takes seconds of a core.

        Call it after this process's own heavy imports: two threads that import overlapping packages can trip over each other.
        """
        if self._thread.ident is None:
            self._thread.start()

    def close(self, timeout_s: float) -> Delivery:
        """Send what the log has for at most `timeout_s`; the rest can be sent later."""
        self._closing.set()
        self.start()
        self._thread.join(timeout_s)
        self._abandoned.set()
        self._thread.join(0.5)  # a request that is answered soon is its last one, and lets another process send the rest
        return self._syncer.delivery()

    def _run(self) -> None:
        if sys.platform == "linux":
            # Training goes first where cores are short, also on a cluster, whose workers Ray gives niceness 15. On Linux niceness
            # belongs to a thread.
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        while (lock := try_lock(self._lock_path)) is None:
            if self._abandoned.wait(1.0):
                return
        try:
            with contextlib.suppress(OSError):  # each sync writes it again, and says what is wrong
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
    """Make MLflow equal to a run's log now; gives up after `max_failures` in a row. `name`, `until_s`: as of `Syncer`.

    Raises:
        ExperimentError: a URI that MLflow cannot write to.
        OSError: the run directory cannot be read.
    """
    uri = checked_uri(uri)
    if (lock := try_lock(lock_path(run_dir))) is None:
        return Delivery(False, f"another process is sending the events of {name or run_dir.root} just now")
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


def sync_neighbours(
    runs_root: Path, finished: RunDir, uri: str, open_view: OpenView, limit_s: float
) -> tuple[list[Path], list[Path]]:
    """Send for `limit_s` what earlier runs under the root could not, now that the store of `finished`, at `uri`, has answered.

    Only runs of the same store are tried, once each; one that cannot be read holds up nothing. Returns the directories that are
    sent, and those for which there was no time.
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
    """Why a request failed, in one line without secrets."""
    return redact(first_line(root_cause(error)))[:200]


def root_cause(error: BaseException) -> BaseException:
    """The innermost error: of a socket or SQLite, under the layers that name the request."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return error
