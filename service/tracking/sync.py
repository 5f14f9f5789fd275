"""Sends a run's log to MLflow, in order and each metric once.

A tag on each MLflow run, written after the metrics, names the last line of the log that had been read then. Later events may
have arrived too; they are sent again with the log's time, value and step, which MLflow treats as the same row.
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
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from service.config.uris import checked_uri
from service.tracking.run_view import OpenView, SyncState, lock_path
from service.tracking.stores import CLIENT_ENVIRONMENT, reason_of
from trainables.errors import ExperimentError, first_three
from trainables.locks import try_lock
from trainables.redact import redact
from trainables.rundir import RunDir

if TYPE_CHECKING:
    from service.tracking.sender import Sender

log = logging.getLogger("raydistill")

MAX_WAIT_S = 15.0
REQUEST_TIMEOUT_S = "60"


class Delivery(NamedTuple):
    """Whether MLflow has all events of a run, and a line for the user."""

    is_complete: bool
    message: str


class Syncer:
    """Tries to send one log to one store. The caller holds the run's sync lock.

    `name` is the run directory as the user wrote it.
    """

    def __init__(self, run_dir: RunDir, uri: str, experiment: str, open_view: OpenView, name: str = "") -> None:
        """Raises OSError: the run directory cannot be read."""
        self._run_dir, self._open_view, self._name = run_dir, open_view, name or str(run_dir.root)
        self.state = SyncState.of(run_dir, uri, experiment)
        self._sender: Sender | None = None
        self._refused: dict[str, set[Any]] = {}
        """What the store rejects for good, by reason."""
        self._trouble, self._is_complete = "", False

    def try_sync(self, *, is_last: bool = False, until_s: float = math.inf) -> bool:
        """Send all new events of the log. Returns whether MLflow has them all.

        Raises nothing: if the store is down, busy or misconfigured, try again later; each outage is logged once. If it only
        rejects files, all else is sent. For the arguments see `Sender.send`.
        """
        before, where = self._trouble, redact(self.state.uri)
        self._is_complete = False  # `close` may ask for the delivery meanwhile
        try:
            sender = self._sender = self._sender or self._open()
            problem = sender.send(is_last=is_last, until_s=until_s)
            self._trouble = f"{where} has the metrics but {problem}" if problem else ""
            self._is_complete = not problem and not sender.unsent()
        except Exception as error:
            self._sender = None
            self._trouble = f"{where} did not accept all events ({reason_of(error)})"
        if self._trouble and not before:
            log.warning("tracking: %s; unsent events stay in %s", self._trouble, self._run_dir.events)
        elif before and not self._trouble:
            log.info("tracking: %s accepts events again", where)
        return self._is_complete

    def _open(self) -> Sender:
        os.environ.update(CLIENT_ENVIRONMENT)
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", REQUEST_TIMEOUT_S)
        from service.tracking.sender import Sender

        return Sender(self._run_dir, self.state, self._open_view(self._run_dir), self._refused)

    @property
    def num_accepted(self) -> int:
        """Requests that the store has accepted since the connection was opened; -1 without one."""
        return self._sender.num_accepted if self._sender else -1

    def delivery(self) -> Delivery:
        """Say whether everything was sent, and what to do if not."""
        where, num = redact(self.state.uri), sum(map(len, self._refused.values()))
        but = f", except {num} that cannot be sent: {first_three(list(self._refused))}" if num else ""
        if self._is_complete:
            return Delivery(True, f"MLflow has every event ({where}){but}")
        left = self._trouble or f"{where} does not have every event yet"
        return Delivery(False, f"{left}{but}; later, run distill sync {shlex.quote(self._name)}")


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
        if SyncState.read(run_dir) != self._syncer.state:  # later runs use it to find what this one could not send
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

    def close(self, timeout_s: float, max_s: float = 0.0) -> Delivery:
        """Send the rest of the log, for `timeout_s`, and up to `max_s` while the store accepts it. The rest can be sent later."""
        until_s, num_before = time.monotonic() + max_s, self._syncer.num_accepted
        self._closing.set()
        self.start()
        self._thread.join(timeout_s)
        while self._thread.is_alive() and time.monotonic() < until_s and num_before != (num := self._syncer.num_accepted):
            num_before = num
            self._thread.join(min(timeout_s, until_s - time.monotonic()))
        self._abandoned.set()
        self._thread.join(0.5)  # lets a current request finish, and release the lock for another process
        return self._syncer.delivery()

    def _run(self) -> None:
        if sys.platform == "linux":
            # Training has priority. Ray gives workers niceness 15 unless the variable says otherwise, as for a local Ray. Far
            # below them this thread would get no processor on a busy machine. On Linux niceness is per thread.
            niceness = min(19, int(os.environ.get("RAY_worker_niceness", "15")) + 5)  # noqa: SIM112 (its own spelling)
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
        while (lock := try_lock(self._lock_path)) is None:
            if self._abandoned.wait(1.0):
                return
        try:
            self._sync_until_closed()
        finally:
            lock.release()

    def _sync_until_closed(self) -> None:
        num_failures = 0
        while not self._abandoned.is_set():
            is_last = self._closing.is_set()
            is_sent = self._syncer.try_sync(is_last=is_last)
            num_failures = 0 if is_sent else min(num_failures + 1, 10)
            if not is_last:
                self._closing.wait(min(MAX_WAIT_S, 0.5 * 2**num_failures) if num_failures else self._poll_s)
            elif is_sent:
                return
            else:
                self._abandoned.wait(1.0)


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


def sync_pending_runs(runs_root: Path, uri: str, open_view: OpenView, limit_s: float) -> tuple[list[Path], list[Path]]:
    """Send pending events of runs under the root whose store is the one at `uri`, for `limit_s`.

    Each is tried once; unreadable ones are logged. Returns the directories that were sent, and those for which there was no time.
    """
    until_s = time.monotonic() + limit_s
    sent, left = list[Path](), list[Path]()
    for folder in sorted(path.parent for path in runs_root.glob("*/.mlflow.json")):
        run_dir = RunDir(folder)
        try:
            state = SyncState.read(run_dir)
            if state is None or state.uri != uri or state.is_sent(run_dir):
                continue
            in_time = time.monotonic() < until_s
            if in_time and sync(run_dir, uri, state.experiment, open_view, max_failures=1, until_s=until_s).is_complete:
                sent.append(folder)
            elif time.monotonic() >= until_s:
                left.append(folder)
        except (OSError, ExperimentError) as error:
            log.warning("tracking: the log of %s cannot be read: %s", folder, error)
    return sent, left
