"""Carries a spool to a store, in order and once.

Delivery may stop anywhere and goes on from the spool's cursor, so a record may be sent twice. It arrives once, because it
carries what identifies it: a metric its time and step, a run and a model a tag, parameters, tags and artifacts their name.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from service.tracking.refused_records import RefusedRecords, one_line
from service.tracking.shown_metrics import of_epoch
from service.tracking.spool import CHUNK_BYTES, Cursor, Delivery, RefusedError, Row, Spool, Tail, Target, is_event
from trainables.errors import first_three
from trainables.redact import redact
from trainables.rundir import lines_after

if TYPE_CHECKING:
    from service.tracking.mlflow_store import Store

log = logging.getLogger("raydistill")

NO_TELEMETRY = {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"}
"""Environment in which MLflow, and its UI in the browser, send nothing to its makers. Read when MLflow is imported."""

CLIENT_ENVIRONMENT = {
    **NO_TELEMETRY,
    # A retry below this module would repeat a create_run whose answer is late; here we look first whether the run is there.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    # Or a logged model would be given the uv.lock and pyproject.toml of the folder that the user stands in.
    "MLFLOW_UV_AUTO_DETECT": "false",
}
REQUEST_TIMEOUT_S = "60"
PER_REQUEST = {"params": 100, "tags": 100, "metrics": 1000}
"""What MLflow takes in one log_batch."""

MLFLOW_NAMES = {"raydistill.commit": "mlflow.source.git.commit"}
"""Tags that MLflow's pages look for under names of their own."""


class _OutOfTimeError(Exception):
    """What is left was not sent, as the time for it had passed."""


class Sender:
    """One spool, one store. Whoever holds the spool's lock calls it. `name`: the run directory as the user names it."""

    def __init__(self, spool: Spool, target: Target, name: str):
        self.uri = target.uri
        self._spool, self._target, self._name = spool, target, name
        self._store: Store | None = None
        self._cursor = Cursor()
        self._refused = RefusedRecords(spool, self._cursor, name)
        self._rows: dict[tuple[str, str], list[Row]] = {}
        """(run key, kind) → what the next requests take."""
        self._num_unsaved = 0
        self._num_sent = 0
        self._until_s = math.inf
        self._retry_pending = False
        """Whether refused records were to be sent again, and were not yet."""
        self._trouble = ""
        self._upload_trouble = ""
        """Why a file could not be uploaded in this delivery; no other one is tried in it."""

    def try_deliver(self, *, retry_refused: bool = False, until_s: float = math.inf) -> bool:
        """Send everything that lies in the spool and the followed files; False where the store did not take all of it.

        Nothing is raised: a store that is away, busy or misconfigured is a reason to try again later, logged once an outage.
        Where it only takes no files, everything else arrives. `retry_refused`: send first what was set aside as refused.
        `until_s`, of the monotonic clock: later no further request begins.
        """
        trouble = ""
        self._until_s = until_s
        self._retry_pending = retry_refused
        try:
            self._deliver()
            if self._upload_trouble:
                waiting = counted(len(self._cursor.deferred), "artifact waits", "artifacts wait")
                trouble = f"metrics are sent to {self._where}; {waiting}: {self._upload_trouble}"
        except _OutOfTimeError:
            return False
        except Exception as error:
            trouble = self._denial(error) or f"{self._where} takes no records now ({reason_of(error)})"
        if trouble and not self._trouble:
            log.warning("tracking: %s; what is left waits in %s", trouble, self._spool.root)
        elif self._trouble and not trouble:
            log.info("tracking: %s takes everything again", self._where)
        self._trouble = trouble
        return not trouble

    def summary(self) -> Delivery:
        """Records sent by this sender, records left, and a line that says what to do about them."""
        num_pending, num_refused, but = self._spool.num_pending(self.uri), len(self._spool.refused_records()), ""
        if self._retry_pending:
            num_pending += num_refused
        elif num_refused:
            but = f", but for {num_refused} that it cannot take, which are in {self._spool.refused}"
            if reasons := list(dict.fromkeys(self._cursor.refused_runs.values())):
                but += f": {first_three(reasons)}"
        if not num_pending:
            return Delivery(self._num_sent, 0, f"MLflow was sent every record ({self._where}){but}")
        left = self._trouble or f"{self._where} has not taken them yet"
        if num_pending > len(self._cursor.deferred):
            left = f"{counted(num_pending, 'record waits', 'records wait')} on disk: {left}"
        return Delivery(self._num_sent, num_pending, f"{left}{but}; later: distill sync {self._name}")

    @property
    def _where(self) -> str:
        return redact(self.uri)

    def _denial(self, error: Exception) -> str:
        """Why the server refuses a login or an experiment, which time alone does not change; "" for another error."""
        if not hasattr(error, "get_http_status_code"):  # MLflow's errors have it
            return ""
        status = error.get_http_status_code()
        if status not in (401, 403):
            return ""
        from service.tracking.server_check import denial

        return denial(status, self.uri, self._target.experiment, f"HTTP {status}")

    def _deliver(self) -> None:
        store = self._store or self._connect()
        self._rows.clear()
        self._num_unsaved = 0
        self._upload_trouble = ""
        if self._retry_pending:
            # Followed files first: a retry that is cut short forgets what it found refused, and their lines are sent only once.
            self._drain_open(store)
            self._retry_refused(store)
        while lines := lines_after(self._spool.events, self._cursor.offset, CHUNK_BYTES):
            before = self._cursor.offset
            for line in lines:
                event = line.record
                if event is not None and not is_event(event):
                    self._refused.set_aside([event], "no event that this version knows")
                elif event is not None and event["op"] in PER_REQUEST:
                    self._wait_for_more(event)
                elif event is not None:
                    self._commit(store, before)
                    self._carry_out(store, event)
                    self._commit(store, line.end)
                before = line.end
            self._commit(store, before)
        self._drain_open(store)
        self._upload_deferred(store)

    def _connect(self) -> Store:
        os.environ.update(CLIENT_ENVIRONMENT)
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", REQUEST_TIMEOUT_S)
        from service.tracking.mlflow_store import Store

        store = Store(self.uri, self._target.experiment, self._spool.root)
        cursor = self._spool.cursor(self.uri)
        cursor.experiment_id = store.experiment_id
        # The store last: with it there is a connection, whose cursor is saved over the one on disk.
        self._refused, self._cursor, self._store = RefusedRecords(self._spool, cursor, self._name), cursor, store
        return store

    def _wait_for_more(self, event: dict[str, Any]) -> None:
        """Parameters, tags and metrics of many events go in one request."""
        try:
            self._rows.setdefault((event["key"], event["op"]), []).extend(rows(event))
        except RefusedError as refusal:
            self._refused.set_aside([event], one_line(refusal))
        else:
            self._num_unsaved += 1

    def _carry_out(self, store: Store, event: dict[str, Any]) -> None:
        """Every other event is a request of its own."""
        is_sent = True
        try:
            match event["op"]:
                case "run":
                    self._begin(store, event)
                case "follow":
                    self._follow(event)
                case "dataset":
                    store.log_dataset(self._refused.run_id(event["key"]), event["dataset"])
                case "views":
                    self._add_views(store, event["views"])
                case "artifact" | "model":
                    is_sent = self._upload(store, event)
                case "end":
                    self._end(store, event)
        except RefusedError as refusal:
            reason = self._refused.handle_refusal(store, event["key"], refusal, begins=event["op"] == "run")
            self._refused.set_aside([event], reason)
        else:
            self._num_unsaved += is_sent

    def _commit(self, store: Store, end: int) -> None:
        """Send what waits, then move the cursor behind it."""
        self._flush(store)
        if self._num_unsaved or end != self._cursor.offset:
            self._cursor.offset = end
            self._save()

    def _save(self) -> None:
        self._spool.save_cursor(self.uri, self._cursor)
        self._num_sent += self._num_unsaved
        self._num_unsaved = 0
        if time.monotonic() > self._until_s:
            raise _OutOfTimeError

    def _flush(self, store: Store) -> None:
        for (key, kind), waiting in self._rows.items():
            for start in range(0, len(waiting), PER_REQUEST[kind]):
                self._send(store, key, kind, waiting[start : start + PER_REQUEST[kind]])
        self._rows.clear()

    def _send(self, store: Store, key: str, kind: str, part: list[Row]) -> None:
        """One request. Where it is refused: its halves, until what the store does not want stands alone and is set aside."""
        try:
            store.log(self._refused.run_id(key), kind, part)
        except RefusedError as refusal:
            reason = self._refused.handle_refusal(store, key, refusal)
            if len(part) == 1 or not self._refused.is_run_open(key):
                self._refused.set_aside([{"key": key, "kind": kind, "row": row} for row in part], reason)
                return
            middle = len(part) // 2
            self._send(store, key, kind, part[:middle])
            self._send(store, key, kind, part[middle:])

    def _retry_refused(self, store: Store) -> None:
        with self._refused.resending() as records:
            for record in records:
                if is_event(record) and record["op"] not in PER_REQUEST:
                    self._flush(store)
                    self._carry_out(store, record)
                elif record.keys() >= {"key", "kind", "row"} and record["kind"] in PER_REQUEST:
                    self._rows.setdefault((record["key"], record["kind"]), []).append(tuple(record["row"]))
                else:
                    self._refused.set_aside([record], str(record.get("reason")))
            self._flush(store)
            self._save()
        self._retry_pending = False

    def _drain_open(self, store: Store) -> None:
        for tail in self._cursor.tails:
            if tail.open:
                self._drain(store, tail)

    def _drain(self, store: Store, tail: Tail) -> None:
        """Send a followed file's new lines."""
        while lines := lines_after(self._spool.path_of(tail.path), tail.offset, CHUNK_BYTES):
            for line in lines:
                record = line.record
                if record is not None and record.get("kind") == "epoch" and record.get("stage") == tail.stage:
                    try:
                        self._rows.setdefault((tail.key, "metrics"), []).extend(
                            rows(record, partial(of_epoch, prefix=tail.prefix))
                        )
                    except RefusedError as refusal:
                        self._refused.set_aside([record], one_line(refusal))
                    else:
                        self._num_unsaved += 1
            self._flush(store)
            tail.offset = lines[-1].end
            self._save()

    def _begin(self, store: Store, event: dict[str, Any]) -> None:
        key, tags = event["key"], event["tags"]
        if run_id := self._cursor.runs.get(key):
            store.reopen_run(run_id)
        else:
            self._cursor.runs[key] = self._open_run(store, event)
        self._cursor.refused_runs.pop(key, None)
        self._rows[key, "params"] = list(event["params"].items())
        self._rows[key, "tags"] = [*tags.items(), *((MLFLOW_NAMES[name], tags[name]) for name in tags if name in MLFLOW_NAMES)]

    def _open_run(self, store: Store, event: dict[str, Any]) -> str:
        """Find the run of an event, or create it. Its id; the run is known once its first metric has arrived."""
        key = event["key"]
        if found := store.find_runs(self._tag(key)):
            run_id = found[0]
            store.reopen_run(run_id)
        else:
            # Counted before asking: where the answer is lost the run may exist, now or when a slow server gets to it.
            self._cursor.creates[key] = self._cursor.creates.get(key, 0) + 1
            self._spool.save_cursor(self.uri, self._cursor)
            parent_id = self._cursor.runs.get(event["parent"])
            run_id = store.create_run(self._tag(key), event["name"], parent_id, event["time_ms"])
        if first := event.get("first_metric"):
            store.log(run_id, "metrics", [(first, math.nan, event["time_ms"], 0)])
        return run_id

    def _tag(self, key: str) -> str:
        return f"{self._target.spool_id}/{key}"

    def _follow(self, event: dict[str, Any]) -> None:
        for tail in self._cursor.tails:
            if (tail.key, tail.stage) == (event["key"], event["stage"]):
                tail.open = True
                return
        self._cursor.tails.append(Tail(key=event["key"], path=event["path"], stage=event["stage"], prefix=event["prefix"]))

    def _add_views(self, store: Store, views: Mapping[str, str]) -> None:
        if reason := store.add_views(views):
            log.warning("tracking: %s has no saved views of the trials: %s", self._where, reason)
        else:
            self._cursor.views = list(views)

    def _upload(self, store: Store, event: dict[str, Any]) -> bool:
        """Whether a file was sent. Else it is deferred: a server that takes records may have nowhere to put files."""
        self._cursor.deferred = [other for other in self._cursor.deferred if upload_of(other) != upload_of(event)]
        run_id, path = self._refused.run_id(event["key"]), self._spool.path_of(event["path"])
        if not self._upload_trouble:
            try:
                if event["op"] == "model":
                    store.log_model(run_id, path, self._tag(event["key"]))
                else:
                    store.log_artifact(run_id, path, event["artifact_path"])
                return True
            except RefusedError:
                raise
            except Exception as error:
                self._upload_trouble = reason_of(error)
        self._cursor.deferred.append(event)
        return False

    def _upload_deferred(self, store: Store) -> None:
        """Try again what was deferred, until one fails: most likely the others would too. It is the last one of the next time."""
        for event in list(self._cursor.deferred):
            if self._upload_trouble:
                break
            self._carry_out(store, event)
            self._save()

    def _end(self, store: Store, event: dict[str, Any]) -> None:
        key = event["key"]
        run_id = self._refused.run_id(key)
        for tail in self._cursor.tails:
            if tail.key == key and tail.open:
                self._drain(store, tail)
                tail.open = False
        store.end_run(run_id, event["status"], event["time_ms"])
        if self._cursor.creates.get(key, 0) > 1:
            for twin in store.find_runs(self._tag(key)):
                if twin != run_id:
                    store.delete_run(twin)


def rows(record: Mapping[str, Any], shown: Callable[[Mapping[str, float]], Mapping[str, float]] = dict) -> list[Row]:
    """A record's parameters, tags or `shown` metrics as rows. Raises RefusedError: a record that is none of ours."""
    try:
        if "values" in record:
            return list(record["values"].items())
        time_ms, step = int(record["time_ms"]), int(record["step"])
        return [(name, float(value), time_ms, step) for name, value in shown(record["metrics"]).items()]
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise RefusedError(f"not a record of ours: {error!r}") from error


def upload_of(event: Mapping[str, Any]) -> tuple[Any, ...]:
    """What an artifact or model event uploads, and where to: as the file is by then, and so the same for equal events."""
    return event["op"], event["key"], event["path"], event.get("artifact_path")


def counted(number: int, one: str, several: str) -> str:
    """`1 record waits`, `2 records wait`."""
    return f"{number} {one if number == 1 else several}"


def reason_of(error: Exception) -> str:
    """Why a request failed, in one line without secrets."""
    return redact(one_line(root_cause(error)))


def root_cause(error: BaseException) -> BaseException:
    """The innermost error: of a socket or SQLite, under the layers that name the request."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return error
