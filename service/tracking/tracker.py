"""The face of tracking: where the store is, the recorder that a driver holds, and the delivery of what is left."""

import contextlib
import json
import logging
import math
import os
import re
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any, Literal

from service.config.uris import checked_uri
from service.tracking.sender import CLIENT_ENVIRONMENT, NO_TELEMETRY, Sender
from service.tracking.spool import Cursor, Delivery, Spool
from trainables.errors import ExperimentError
from trainables.rundir import RunDir, unwritable_reason

log = logging.getLogger("raydistill")

Status = Literal["FINISHED", "FAILED", "KILLED"]

MAX_WAIT_S = 15.0
DESCRIPTION = "mlflow.note.content"
SERVERS = ("http://", "https://", "databricks")
_SQLITE = b"SQLite format 3\0"


def default_uri(runs_root: Path) -> str:
    """The SQLite store of a runs' root, absolute, since Ray changes the working directory.

    Raises ExperimentError: a path that an SQLite URI cannot hold.
    """
    return checked_uri(f"sqlite:///{Path(os.path.abspath(runs_root)) / 'mlflow.db'}")


def check_store(uri: str, experiment: str) -> None:
    """Refuse a store of the user's that could not be opened, or a server that will never take records. Nothing is made.

    Raises ExperimentError.
    """
    scheme, _, named = checked_uri(uri).partition(":///")
    if uri.startswith(SERVERS):
        os.environ.update(CLIENT_ENVIRONMENT)
        from service.tracking.server_check import check_server

        check_server(uri, experiment)
    if scheme != "sqlite":
        return
    path = Path(named)
    if not path.parent.exists():
        raise ExperimentError(f"tracking.uri: there is no folder {path.parent}: create it, or choose another")
    if path.is_dir():
        raise ExperimentError(f"tracking.uri: {path} is a folder: write the path of a file in it")
    if reason := unwritable_reason(path.parent):
        raise ExperimentError(f"tracking.uri: {reason}: choose another")
    if path.exists() and not os.access(path, os.R_OK | os.W_OK):
        raise ExperimentError(f"tracking.uri: {path} is read-only for you: choose another")
    if path.exists() and not path.is_file():
        raise ExperimentError(f"tracking.uri: {path} is no file: write the path of one")
    if path.exists() and path.stat().st_size:
        with open(path, "rb") as file:
            if file.read(len(_SQLITE)) != _SQLITE:
                raise ExperimentError(f"tracking.uri: {path} is no SQLite database: choose another file")


def ui_command(runs_root: Path, host: str = "127.0.0.1", port: int = 5000) -> list[str]:
    """The command that opens MLflow's UI on the store of a runs' root, behind a token; see `ui_environment`."""
    options = {
        "--backend-store-uri": default_uri(runs_root),
        "--artifacts-destination": (Path(os.path.abspath(runs_root)) / "mlartifacts").as_uri(),
        "--host": host,
        "--port": str(port),
        "--workers": "1",
        "--app-name": "raydistill",
    }
    return [sys.executable, "-m", "mlflow", "server", *(word for option in options.items() for word in option)]


def ui_environment(token: str, *, changes: bool) -> dict[str, str]:
    """The environment of `ui_command`. `changes`: whether whoever knows `token` may also write and delete."""
    ours = {"RAYDISTILL_UI_TOKEN": token, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    return {**os.environ, **NO_TELEMETRY, **ours} | ({"RAYDISTILL_UI_CHANGES": "1"} if changes else {})


def compare_urls(run_dir: RunDir, base: str = "http://127.0.0.1:5000") -> list[str]:
    """The saved views of a run's MLflow experiment, the table and the charts; its list of runs where it has no views of ours.

    [] where the store has not taken anything. `base`: the address of a server, or of the UI that `ui_command` opens.
    """
    spool = Spool(run_dir)
    target = spool.target()
    cursor = spool.cursor(target.uri) if target else Cursor()
    if not cursor.runs:
        return []
    # MLflow 3.17 opens as a tool for language models unless the address says otherwise.
    page = f"{base.rstrip('/')}/#/experiments/{cursor.experiment_id}/runs?workflowType=machine_learning"
    modes = ("", "&compareRunsMode=CHART")
    return [f"{page}&viewStateShareKey={key}{mode}" for key, mode in zip(cursor.views, modes, strict=False)] or [page]


class Tracker:
    """The recorder. Each method appends to the spool and returns within milliseconds; none waits for the store.

    No method but `__init__` raises for what happens outside, such as a full disk or a store that takes nothing; `start_run`
    raises ValueError for a key that MLflow could not search for.

    `key` names a run within its run directory. Times (unix ms) are fixed when a method is called, not when it is delivered.
    """

    def __init__(self, run_dir: RunDir, uri: str, experiment: str, poll_s: float = 5.0, name: str = ""):
        """`poll_s`: seconds between two looks at the spool; longer means fewer and larger requests.

        `name`: the run directory as the user names it, where that is not its path.

        Raises:
            ExperimentError: a URI that MLflow cannot write to, or a spool that is damaged.
            OSError: the run directory cannot be written.
        """
        self._spool = Spool(run_dir)
        self._sender = Sender(self._spool, self._spool.aim(checked_uri(uri), experiment), name or str(run_dir.root))
        self._poll_s = poll_s
        self._closing, self._abandoned = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._deliver, name="tracking", daemon=True)
        self._unwritten = list[tuple[str, str, int, dict[str, Any]]]()
        """Events that the disk has not taken, in order."""
        self._appending = threading.Lock()
        self._unwritable: OSError | None = None

    def start_run(
        self,
        key: str,
        name: str,
        parent_key: str | None = None,
        params: Mapping[str, Any] | None = None,
        tags: Mapping[str, Any] | None = None,
        first_metric: str = "",
    ) -> None:
        """Begin a run, or take up again the one that was begun under this key.

        Nested `params` become dotted names. A tag `raydistill.commit` also fills MLflow's own version column. `first_metric` is
        NaN until it is known, so that it is the first of the run, on which MLflow's page for comparing runs opens.

        Raises ValueError: a key that MLflow could not search for.
        """
        if not re.fullmatch(r"[\w.:/ -]+", key):
            raise ValueError(f"run key {key!r}: use letters, digits and _.:/ -")
        params, tags = flat(params or {}), flat(tags or {})
        self._append("run", key, name=name, parent=parent_key, params=params, tags=tags, first_metric=first_metric)

    def params(self, key: str, params: Mapping[str, Any]) -> None:
        """Add parameters; MLflow keeps the first value of each."""
        self._append("params", key, values=flat(params))

    def dataset(self, key: str, dataset: Mapping[str, str]) -> None:
        """Say what a run is trained on: `name`, `digest` (at most 36 characters), `source_type`, `source` and `profile`."""
        self._append("dataset", key, dataset=dict(dataset))

    def views(self, key: str, views: Mapping[str, str]) -> None:
        """Save views of the experiment, see `saved_views`, unless it has them."""
        self._append("views", key, views=dict(views))

    def tags(self, key: str, tags: Mapping[str, Any]) -> None:
        self._append("tags", key, values=flat(tags))

    def describe(self, key: str, paragraphs: Sequence[str]) -> None:
        """Set the description that MLflow shows on the run's page, in place of an earlier one."""
        self.tags(key, {DESCRIPTION: "\n\n".join(paragraphs)})

    def metrics(self, key: str, step: int, values: Mapping[str, Any], time_ms: int | None = None) -> None:
        """Add one value of each metric at `step`. Values that are not finite are kept as such, what is no number is left out."""
        numbers = {name: float(value) for name, value in values.items() if isinstance(value, Real)}
        self._append("metrics", key, time_ms, step=step, metrics=numbers)

    def follow(self, key: str, log_path: Path, stage: str, prefix: str) -> None:
        """Deliver the epochs that the run's log has of a stage until the run ends, see `of_epoch`.

        The worker's summary is left out: the driver records it with `metrics`, once, when it knows how the stage ended.
        """
        self._append("follow", key, path=self._spool.name_of(log_path), stage=stage, prefix=prefix)

    def artifact(self, key: str, path: Path, artifact_path: str = "") -> None:
        """Add a file or folder, as it is when it is delivered."""
        self._append("artifact", key, path=self._spool.name_of(path), artifact_path=artifact_path)

    def model(self, key: str, checkpoint_path: Path) -> None:
        """Log a student's checkpoint as an MLflow model; a second time only where its weights differ."""
        self._append("model", key, path=self._spool.name_of(checkpoint_path))

    def end_run(self, key: str, status: Status) -> None:
        """End a run. Call it when the workers have written their last line; it is delivered after all of them."""
        self._append("end", key, status=status)

    def runs(self) -> dict[str, str | None]:
        """Every run that was begun under this run directory, and the status it ended in last; None while it is open."""
        try:
            return self._spool.runs()
        except OSError:  # `_append` has said so
            return {}

    def start(self) -> None:
        """Begin to deliver, in a daemon thread that imports MLflow (seconds of one core).

        Call it after this process's own heavy imports: two threads that import overlapping packages can trip over each other.
        """
        self._thread.start()

    def close(self, timeout_s: float) -> Delivery:
        """Deliver what is there for at most `timeout_s`; the rest stays in the spool, but for what the disk does not take."""
        self._write()
        self._closing.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        self._abandoned.set()
        self._write()  # there may be room by now: then the rest waits on disk
        try:
            delivery = self._sender.summary()
        except OSError as error:
            delivery = Delivery(0, 0, f"the records for MLflow cannot be read: {error}")
        with self._appending:
            if not self._unwritten:
                return delivery
            num_lost = len(self._unwritten)
        lost = f"{num_lost} records are lost: {self._spool.events} could not be written ({self._unwritable})"
        message = f"{delivery.message}\n{lost}" if delivery.num_pending else lost
        return Delivery(delivery.num_sent, delivery.num_pending + num_lost, message)

    def _append(self, op: str, key: str, time_ms: int | None = None, **fields: Any) -> None:
        with self._appending:
            self._unwritten.append((op, key, time.time_ns() // 1_000_000 if time_ms is None else time_ms, fields))
        self._write()

    def _write(self) -> None:
        """Append to the spool what it does not have yet; what a full disk does not take is tried again with the next event."""
        with self._appending:
            try:
                while self._unwritten:
                    op, key, time_ms, fields = self._unwritten[0]
                    self._spool.append(op, key, time_ms, **fields)
                    del self._unwritten[0]
                self._unwritable = None
            except OSError as error:
                if self._unwritable is None:
                    log.warning(
                        "tracking: cannot write %s (%s); records wait in memory until it can be written",
                        self._spool.events,
                        error,
                    )
                self._unwritable = error

    def _deliver(self) -> None:
        if sys.platform == "linux":
            # Training goes first where cores are short, also on a cluster, whose workers Ray gives niceness 15. On Linux niceness
            # belongs to a thread.
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 19)
        while not self._abandoned.is_set():
            with self._spool.sender_lock() as acquired:
                if acquired:
                    self._deliver_locked()
                    return
            self._abandoned.wait(1.0)

    def _deliver_locked(self) -> None:
        num_failures = 0
        while not self._abandoned.is_set():
            last = self._closing.is_set()
            if self._sender.try_deliver():
                if last:
                    return
                num_failures = 0
                self._closing.wait(self._poll_s)
            else:
                num_failures += 1
                wait_s = min(MAX_WAIT_S, 0.5 * 2 ** min(num_failures, 10))
                _ = self._abandoned.wait(min(wait_s, 1.0)) if last else self._closing.wait(wait_s)


def sync(run_dir: RunDir, uri: str | None = None, max_failures: int = 3, name: str = "", until_s: float = math.inf) -> Delivery:
    """Deliver a run directory's spool now, to the store it was meant for or to `uri`; gives up after `max_failures` in a row.

    What was refused before is sent again. `name`: as in `Tracker`; `until_s`: as in `Sender.try_deliver`.

    Raises ExperimentError: a URI that MLflow cannot write to, or a spool that is damaged.
    """
    name = name or str(run_dir.root)
    spool = Spool(run_dir)
    target = spool.target()
    if target is None:
        return Delivery(0, 0, f"{name} holds nothing for MLflow")
    sender = Sender(spool, target.model_copy(update={"uri": checked_uri(uri or target.uri)}), name)
    with spool.sender_lock() as acquired:
        if not acquired:
            return Delivery(0, spool.num_pending(sender.uri), f"another process is sending the records of {name} just now")
        if not spool.num_pending(sender.uri) and not spool.refused_records():
            return sender.summary()
        for attempt in range(1, max_failures + 1):
            if sender.try_deliver(retry_refused=True, until_s=until_s):
                break
            if attempt < max_failures:
                time.sleep(2**attempt)
    return sender.summary()


def sync_neighbours(runs_root: Path, finished: RunDir, limit_s: float) -> tuple[list[Path], list[Path]]:
    """Deliver for `limit_s` what earlier runs under the root could not, now that the store of `finished` has answered.

    Only spools meant for the same store are tried, once each; one that cannot be read holds up nobody. Returns the directories
    that are delivered, and those for which there was no time.
    """
    acquired, until_s = Spool(finished).target(), time.monotonic() + limit_s
    delivered, left = list[Path](), list[Path]()
    for folder in sorted(path.parent for path in runs_root.glob("*/spool")):
        spool = Spool(RunDir(folder))
        try:
            target = spool.target()
            if acquired is None or target is None or target.uri != acquired.uri or folder == finished.root:
                continue
            if not spool.num_pending(target.uri):
                continue
            if time.monotonic() < until_s and not sync(RunDir(folder), max_failures=1, until_s=until_s).num_pending:
                delivered.append(folder)
            elif time.monotonic() >= until_s:
                left.append(folder)
        except (OSError, ExperimentError) as error:
            log.warning("tracking: the records of %s cannot be read: %s", folder, error)
    return delivered, left


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested mappings as dotted names; values as text: strings as they are, everything else as JSON."""
    out: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            out.update(flat(value, f"{prefix}{name}."))
        else:
            out[f"{prefix}{name}"] = value if isinstance(value, str) else json.dumps(value, default=str)
    return out
