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
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from service.config.uris import checked_uri
from service.tracking.run_view import LogView, OpenView, RefusedError, RunView, SyncState, lock_path, state_path
from service.tracking.stores import CLIENT_ENVIRONMENT
from trainables.errors import ExperimentError, first_line, first_three
from trainables.locks import try_lock
from trainables.redact import redact
from trainables.rundir import RunDir

if TYPE_CHECKING:
    from mlflow.entities import Run

    from service.tracking.mlflow_store import Row, Store

log = logging.getLogger("raydistill")

MAX_WAIT_S = 15.0
REQUEST_TIMEOUT_S = "60"
POSITION_TAG = "raydistill.position"
MAX_ROWS = 1000
MAX_ROWS_OF = {"params": 100, "tags": 100, "metrics": MAX_ROWS}
"""What MLflow takes in one log_batch."""
FILES = ("artifact", "model")
MLFLOW_NAMES = {"raydistill.commit": "mlflow.source.git.commit"}
"""Tags that MLflow's pages look for under names of their own."""


class Delivery(NamedTuple):
    """Whether MLflow has all of a run, and a line for the user."""

    is_complete: bool
    message: str


class _UnavailableError(Exception):
    """MLflow takes nothing for a run or its experiment, until somebody does what the message says."""


class _RestartError(Exception):
    """MLflow lacks what it had once: the log is read again from its beginning."""


class _OutOfTimeError(Exception):
    """What is left was not sent, as the time for it had passed."""


@dataclass
class _Known:
    """A run of MLflow as it was last seen or written."""

    run_id: str
    position: int
    status: str
    tags: dict[str, str]
    params: set[str]
    has_params: bool = False
    """Whether this process has sent those that it lacked."""
    may_have_twin: bool = False
    """Whether its creation was requested more than once: an answer was lost, or late."""


class Syncer:
    """One log, one store. Whoever holds the run's lock calls it. `name`: the run directory as the user names it."""

    def __init__(self, run_dir: RunDir, uri: str, experiment: str, open_view: OpenView, name: str = "") -> None:
        """Raises OSError: the run directory cannot be read."""
        self._run_dir, self._open_view, self._name = run_dir, open_view, name or str(run_dir.root)
        self.state = SyncState.of(run_dir, uri, experiment)
        self._view: LogView = open_view(run_dir, self.state.position)
        self._store: Store | None = None
        self._known: dict[str, _Known] = {}
        self._asked: set[str] = set()
        """Keys of runs whose creation was requested without an answer."""
        self._trouble, self._upload_trouble, self._unavailable = "", "", dict[str, None]()
        self._refused: dict[str, int] = {}
        """Why values were left out that MLflow will never take → how many."""
        self._until_s = math.inf
        self._is_complete = False

    def try_sync(self, *, is_last: bool = False, until_s: float = math.inf) -> bool:
        """Send everything that the log has gained; False where MLflow did not take all of it.

        Nothing is raised: a store that is away, busy or misconfigured is a reason to try again later, logged once an outage.
        Where it only takes no files, everything else arrives. `is_last`: the files of the run's end are complete. `until_s`, of
        the monotonic clock: later nothing more is begun.
        """
        trouble, self._until_s, self._is_complete = "", until_s, False
        self._upload_trouble = ""
        self._unavailable.clear()
        try:
            self._sync(is_last=is_last)
            if self._upload_trouble:
                num = sum(item.kind in FILES for run in self._unsent() for item in run.items)
                wait = f"{num} artifact{'s wait' if num > 1 else ' waits'}"
                trouble = f"metrics are sent to {self._where}; {wait}: {self._upload_trouble}"
            if self._unavailable:
                trouble = first_three(list(self._unavailable))
            self._is_complete = not trouble and not self._unsent()
        except _OutOfTimeError:
            return False
        except _UnavailableError as error:
            trouble = str(error)
        except Exception as error:
            trouble = self._denial(error) or f"{self._where} takes no records now ({reason_of(error)})"
        if trouble and not self._trouble:
            log.warning("tracking: %s; what is left waits in %s", trouble, self._run_dir.events)
        elif self._trouble and not trouble:
            log.info("tracking: %s takes everything again", self._where)
        self._trouble = trouble
        return not trouble

    def delivery(self) -> Delivery:
        """How it went, and what to do about it."""
        num = sum(self._refused.values())
        but = f", but for {num} that {'was' if num == 1 else 'were'} left out: {first_three(list(self._refused))}" if num else ""
        if self._is_complete:
            return Delivery(True, f"MLflow was sent every record ({self._where}){but}")
        left = self._trouble or f"{self._where} has not taken every record yet"
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

    def _sync(self, *, is_last: bool) -> None:
        store = self._store or self._connect()
        while True:
            try:
                self._send_changes(store, is_last=is_last)
            except _RestartError:
                self._view = self._open_view(self._run_dir, 0)
            if not self._view.read():
                return

    def _connect(self) -> Store:
        os.environ.update(CLIENT_ENVIRONMENT)
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", REQUEST_TIMEOUT_S)
        from service.tracking.mlflow_store import Store

        self._store = Store(self.state.uri, self.state.experiment, self._run_dir.root)
        return self._store

    def _unsent(self) -> list[RunView]:
        return [run for run in self._view.runs.values() if run.changed > run.sent]

    def _send_changes(self, store: Store, *, is_last: bool) -> None:
        for run in self._unsent():
            if time.monotonic() > self._until_s:
                raise _OutOfTimeError
            has_files = is_last or run.parent is not None or run.status == "RUNNING"  # else its page is still being made
            try:
                self._send(store, run, has_files=has_files)
            except _UnavailableError as error:
                self._unavailable[str(error)] = None
        position = min((run.sent for run in self._unsent()), default=self._view.end)
        if position != self.state.position:
            self.state.position = position
            self.state.write(self._run_dir)

    def _send(self, store: Store, run: RunView, *, has_files: bool) -> None:
        """Send what a run has gained: its metrics, then its files where it has them, its status, and how far it is."""
        known = self._known.get(run.key) or self._find_or_create(store, run)
        if known.position < run.sent:  # as of a run that was removed for good
            raise _RestartError
        while run.items and run.items[0].end <= known.position:
            run.items.popleft()
        if run.changed > known.position:
            self._log(store, run, known)
            if has_files:
                self._send_files(store, run, known)
            if run.status != known.status:
                self._set_status(store, run, known)
            if run.items:  # files that wait; everything behind the position is sent again by a process that does not know more
                return
            position: Row = ("tags", (POSITION_TAG, run.mark))
            self._request(store, run, "position", lambda: store.log(known.run_id, [position]))
            known.position = run.changed
        run.sent = run.changed

    def _find_or_create(self, store: Store, run: RunView) -> _Known:
        found = self._find(store, run)
        parent = self._known.get(run.parent) if run.parent else None
        if run.parent and parent is None:
            parent = self._find_or_create(store, self._view.runs[run.parent])
        if not found:
            if run.sent:
                raise _RestartError
            may_have_twin = run.key in self._asked
            self._asked.add(run.key)
            run_id = store.create_run(self._tag(run), run.name, parent.run_id if parent else None, run.began_ms)
            known = _Known(run_id, 0, "RUNNING", {}, set(), may_have_twin=may_have_twin)
        else:
            info, data = found[0].info, found[0].data
            if info.lifecycle_stage != "active":
                raise _UnavailableError(self._why_deleted(store, run, info.run_id))
            known = _Known(info.run_id, self._position_of(found[0]), info.status, dict(data.tags), set(data.params))
            known.may_have_twin = run.key in self._asked or len(found) > 1
        self._known[run.key] = known
        self.state.experiment_id = store.experiment_id
        return known

    def _tag(self, run: RunView) -> str:
        """By which a run is found in MLflow."""
        return f"{self._view.id}/{run.key}"

    def _find(self, store: Store, run: RunView) -> list[Run]:
        """What MLflow has of a run: the one that is not deleted and the furthest first."""
        found = store.find_runs(self._tag(run))
        return sorted(found, key=lambda each: (each.info.lifecycle_stage != "active", -self._position_of(each)))

    def _position_of(self, run: Run) -> int:
        """Offset up to which a run of MLflow has the log."""
        return self._view.offset_of(run.data.tags.get(POSITION_TAG, ""))

    def _why_deleted(self, store: Store, run: RunView, run_id: str) -> str:
        again = f"distill sync {shlex.quote(self._name)}"
        if store.is_experiment_deleted():
            return f"experiment {store.experiment!r} was deleted in MLflow: {again} restores it, with its runs"
        return f"run {run_id} ({run.key}) was deleted in MLflow: restore it there, then {again}"

    def _request(self, store: Store, run: RunView, what: str, request: Callable[[], Any]) -> None:
        """Carry out a request, or leave out what MLflow will never take. Raises _UnavailableError, _RestartError."""
        try:
            request()
        except RefusedError as refusal:
            self._check_available(store, run)
            self._leave_out(f"{what} of {run.key}", first_line(refusal))

    def _check_available(self, store: Store, run: RunView) -> None:
        """Whether a request was refused because its run is not there any more, which the next try looks up.

        Raises:
            _UnavailableError: it was deleted, and can be restored.
            _RestartError: it is gone for good.
        """
        known = self._known[run.key]
        found = [each.info for each in self._find(store, run) if each.info.run_id == known.run_id]
        if not found or found[0].lifecycle_stage != "active":
            del self._known[run.key]
            if not found:
                raise _RestartError
            raise _UnavailableError(self._why_deleted(store, run, known.run_id))

    def _leave_out(self, what: str, reason: str) -> None:
        if reason not in self._refused:
            log.warning("tracking: %s is left out: %s", redact(what), redact(reason))
        self._refused[reason] = self._refused.get(reason, 0) + 1

    def _log(self, store: Store, run: RunView, known: _Known) -> None:
        """Send parameters and tags that MLflow lacks, and the metrics."""
        rows: list[Row] = []
        if not known.has_params:  # MLflow keeps the first value of each
            rows += (("params", item) for item in run.params().items() if item[0] not in known.params)
        tags = run.tags | {MLFLOW_NAMES[name]: run.tags[name] for name in run.tags.keys() & MLFLOW_NAMES.keys()}
        rows += (("tags", item) for item in tags.items() if known.tags.get(item[0]) != item[1])
        rows += (("metrics", item.value) for item in run.items if item.kind == "metrics")
        for part in batches(rows):
            self._log_part(store, run, known, part)
        known.has_params, known.tags = True, tags
        known.params.clear()
        run.items = deque(item for item in run.items if item.kind != "metrics")

    def _log_part(self, store: Store, run: RunView, known: _Known, part: list[Row]) -> None:
        """One request. Where it is refused: its halves, until what MLflow does not take stands alone and is left out."""
        try:
            store.log(known.run_id, part)
        except RefusedError as refusal:
            self._check_available(store, run)
            if len(part) == 1:
                self._leave_out(f"{part[0][1][0]} of {run.key}", first_line(refusal))
                return
            middle = len(part) // 2
            self._log_part(store, run, known, part[:middle])
            self._log_part(store, run, known, part[middle:])

    def _send_files(self, store: Store, run: RunView, known: _Known) -> None:
        """Send the files of a run, until one fails: most likely the others would too. A server may have nowhere to put them."""
        requests: dict[str, Callable[[Any], None]] = {
            "dataset": lambda dataset: store.log_dataset(known.run_id, dataset),
            "views": lambda views: self._add_views(store, views),
            "artifact": lambda path: store.log_artifact(known.run_id, path),
            "model": lambda path: store.log_model(known.run_id, self._view.checkpoint(path), self._tag(run)),
        }
        for item in list(run.items):
            is_file = item.kind in FILES
            if is_file and self._upload_trouble:
                continue
            try:
                what = Path(item.value).name if is_file else item.kind
                self._request(store, run, what, partial(requests[item.kind], item.value))
            except Exception as error:
                if not is_file or isinstance(error, _UnavailableError | _RestartError):
                    raise
                self._upload_trouble = reason_of(error)
                continue
            run.items.remove(item)

    def _add_views(self, store: Store, views: dict[str, str]) -> None:
        if reason := store.add_views(views):
            log.warning("tracking: %s has no saved views of the trials: %s", self._where, reason)
        else:
            self.state.views = list(views)

    def _set_status(self, store: Store, run: RunView, known: _Known) -> None:
        if run.status == "RUNNING":
            self._request(store, run, "status", lambda: store.reopen_run(known.run_id))
        else:
            self._request(store, run, "status", lambda: store.end_run(known.run_id, run.status, run.ended_ms))
            if known.may_have_twin:
                for twin in self._find(store, run):
                    if twin.info.run_id != known.run_id and twin.info.lifecycle_stage == "active":
                        store.delete_run(twin.info.run_id)
        known.status = run.status


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
        return Delivery(False, f"another process is sending the records of {name or run_dir.root} just now")
    try:
        syncer = Syncer(run_dir, uri, experiment, open_view, name)
        if syncer.state.is_sent(run_dir):
            return Delivery(True, f"MLflow was sent every record ({redact(uri)})")
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
            if time.monotonic() >= until_s:
                left.append(folder)
            elif sync(run_dir, uri, state.experiment, open_view, max_failures=1, until_s=until_s).is_complete:
                sent.append(folder)
            elif time.monotonic() >= until_s:
                left.append(folder)
        except (OSError, ExperimentError) as error:
            log.warning("tracking: the log of %s cannot be read: %s", folder, error)
    return sent, left


def batches(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Rows in order, in as many requests as MLflow needs."""
    part: list[Row] = []
    counts = dict.fromkeys(MAX_ROWS_OF, 0)
    for row in rows:
        if len(part) == MAX_ROWS or counts[row[0]] == MAX_ROWS_OF[row[0]]:
            yield part
            part, counts = [], dict.fromkeys(MAX_ROWS_OF, 0)
        part.append(row)
        counts[row[0]] += 1
    if part:
        yield part


def reason_of(error: Exception) -> str:
    """Why a request failed, in one line without secrets."""
    return redact(first_line(root_cause(error)))[:200]


def root_cause(error: BaseException) -> BaseException:
    """The innermost error: of a socket or SQLite, under the layers that name the request."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return error
