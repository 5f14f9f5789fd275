"""Carries a spool to a store, in order and once.

Delivery may stop anywhere and goes on from the spool's cursor, so a record may be sent twice. It arrives once, because it
carries what identifies it: a metric its time and step, a run and a model a tag, parameters, tags and artifacts their name.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from service.tracking.spool import CHUNK_BYTES, Cursor, Delivery, RefusedError, Row, Spool, Tail, Target
from trainables.errors import printable
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

NOT_FOLLOWED = ("start", "resume", "summary")
"""Records of a stage that say where it began, which is in its parameters, or what the driver records itself when it has ended."""

MLFLOW_NAMES = {"git_commit": "mlflow.source.git.commit"}
"""Tags that MLflow's pages look for under names of their own."""


class Sender:
    """One spool, one store. Whoever holds the spool's lock calls it."""

    def __init__(self, spool: Spool, target: Target):
        self.uri = target.uri
        self._spool, self._target = spool, target
        self._store: Store | None = None
        self._cursor = Cursor()
        self._rows: dict[tuple[str, str], list[Row]] = {}
        """(run key, kind) → what the next requests take."""
        self._num_unsaved = 0
        self._num_sent = 0
        self._num_refused = 0
        self._trouble = ""

    def try_deliver(self) -> bool:
        """Send everything that lies in the spool and the followed files; False where the store did not take all of it.

        Nothing is raised: a store that is away, busy or misconfigured is a reason to try again later, said once an outage.
        """
        try:
            self._deliver()
        except Exception as error:
            reason = redact(one_line(root_cause(error)))
            if not self._trouble:
                log.warning("tracking: %s takes no records now (%s); they wait in %s", self._where, reason, self._spool.root)
            self._trouble = reason
            return False
        if self._trouble:
            log.info("tracking: %s takes records again", self._where)
        self._trouble = ""
        return True

    def summary(self) -> Delivery:
        """Records sent by this sender, records left, and a line that says what to do about them."""
        num_pending = self._spool.num_pending(self.uri)
        if not num_pending:
            but = f", but refused {self._num_refused}, kept in {self._spool.refused}" if self._num_refused else ""
            return Delivery(self._num_sent, 0, f"MLflow was sent every record ({self._where}){but}")
        why = f": {self._trouble}" if self._trouble else ""
        left = f"{num_pending} records wait on disk, {self._where} has not taken them yet{why}"
        return Delivery(self._num_sent, num_pending, f"{left}; later: distill sync {self._spool.root.parent}")

    @property
    def _where(self) -> str:
        return redact(self.uri)

    def _deliver(self) -> None:
        store = self._store or self._connect()
        self._rows.clear()
        self._num_unsaved = 0
        while lines := lines_after(self._spool.events, self._cursor.offset, CHUNK_BYTES):
            before = self._cursor.offset
            for line in lines:
                event = line.record
                if event is not None and event["op"] in PER_REQUEST:
                    self._wait_for_more(event)
                elif event is not None:
                    self._commit(store, before)
                    self._carry_out(store, event)
                    self._commit(store, line.end)
                before = line.end
            self._commit(store, before)
        for tail in self._cursor.tails:
            if tail.open:
                self._drain(store, tail)

    def _connect(self) -> Store:
        os.environ.update(CLIENT_ENVIRONMENT)
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", REQUEST_TIMEOUT_S)
        from service.tracking.mlflow_store import Store

        self._store = Store(self.uri, self._target.experiment, self._spool.root)
        self._cursor = self._spool.cursor(self.uri)
        self._cursor.experiment_id = self._store.experiment_id
        return self._store

    def _wait_for_more(self, event: dict[str, Any]) -> None:
        """Parameters, tags and metrics of many events go in one request."""
        self._num_unsaved += 1
        try:
            self._rows.setdefault((event["key"], event["op"]), []).extend(rows(event))
        except RefusedError as refusal:
            self._set_aside(event, refusal)

    def _carry_out(self, store: Store, event: dict[str, Any]) -> None:
        """Every other event is a request of its own."""
        try:
            match event["op"]:
                case "run":
                    self._begin(store, event)
                case "follow":
                    self._follow(event)
                case "artifact":
                    store.log_artifact(self._run_id(event["key"]), self._spool.path_of(event["path"]), event["artifact_path"])
                case "model":
                    store.log_model(self._run_id(event["key"]), self._spool.path_of(event["path"]), self._tag(event["key"]))
                case "end":
                    self._end(store, event)
                case op:
                    raise RefusedError(f"no event {op!r} is known")
        except RefusedError as refusal:
            self._set_aside(event, refusal)
        self._num_unsaved += 1

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

    def _flush(self, store: Store) -> None:
        for (key, kind), waiting in self._rows.items():
            for start in range(0, len(waiting), PER_REQUEST[kind]):
                self._send(store, key, kind, waiting[start : start + PER_REQUEST[kind]])
        self._rows.clear()

    def _send(self, store: Store, key: str, kind: str, part: list[Row]) -> None:
        """One request. Where it is refused: its halves, until what the store does not want stands alone and is set aside."""
        try:
            store.log(self._run_id(key), kind, part)
        except RefusedError as refusal:
            if len(part) == 1:
                self._set_aside({"key": key, "kind": kind, "row": part[0]}, refusal)
                return
            middle = len(part) // 2
            self._send(store, key, kind, part[:middle])
            self._send(store, key, kind, part[middle:])

    def _set_aside(self, record: Mapping[str, Any], refusal: RefusedError) -> None:
        if not self._num_refused:
            log.warning(
                "tracking: MLflow refuses a record (%s); such records are kept in %s", one_line(refusal), self._spool.refused
            )
        self._num_refused += 1
        self._spool.set_aside(record, one_line(refusal))

    def _drain(self, store: Store, tail: Tail) -> None:
        """Send a followed file's new lines."""
        while lines := lines_after(self._spool.path_of(tail.path), tail.offset, CHUNK_BYTES):
            for line in lines:
                record = line.record
                if record is not None and record.get("kind") not in NOT_FOLLOWED:
                    try:
                        self._rows.setdefault((tail.key, "metrics"), []).extend(rows(record, tail.prefix))
                    except RefusedError as refusal:
                        self._set_aside(record, refusal)
                    self._num_unsaved += 1
            self._flush(store)
            tail.offset = lines[-1].end
            self._save()

    def _run_id(self, key: str) -> str:
        if key not in self._cursor.runs:
            raise RefusedError(f"no run {key!r} was begun")
        return self._cursor.runs[key]

    def _begin(self, store: Store, event: dict[str, Any]) -> None:
        key = event["key"]
        known = key in self._cursor.runs
        found = [self._cursor.runs[key]] if known else store.find_runs(self._tag(key))
        if found:
            store.reopen_run(found[0])
            self._cursor.runs[key] = found[0]
        else:
            # Counted before asking: where the answer is lost the run may exist, now or when a slow server gets to it.
            self._cursor.creates[key] = self._cursor.creates.get(key, 0) + 1
            self._spool.save_cursor(self.uri, self._cursor)
            parent_id = self._cursor.runs.get(event["parent"])
            self._cursor.runs[key] = store.create_run(self._tag(key), event["name"], parent_id, event["time_ms"])
        tags = event["tags"]
        self._rows[key, "params"] = list(event["params"].items())
        self._rows[key, "tags"] = [*tags.items(), *((MLFLOW_NAMES[name], tags[name]) for name in tags if name in MLFLOW_NAMES)]
        if not known and (first := event.get("first_metric")):
            self._rows[key, "metrics"] = [(first, math.nan, event["time_ms"], 0)]

    def _tag(self, key: str) -> str:
        return f"{self._target.spool_id}/{key}"

    def _follow(self, event: dict[str, Any]) -> None:
        for tail in self._cursor.tails:
            if (tail.key, tail.path) == (event["key"], event["path"]):
                tail.open = True
                return
        self._cursor.tails.append(Tail(event["key"], event["path"], event["prefix"]))

    def _end(self, store: Store, event: dict[str, Any]) -> None:
        key = event["key"]
        run_id = self._run_id(key)
        for tail in self._cursor.tails:
            if tail.key == key and tail.open:
                self._drain(store, tail)
                tail.open = False
        store.end_run(run_id, event["status"], event["time_ms"])
        if self._cursor.creates.get(key, 0) > 1:
            for twin in store.find_runs(self._tag(key)):
                if twin != run_id:
                    store.delete_run(twin)


def rows(record: Mapping[str, Any], prefix: str = "") -> list[Row]:
    """A record's parameters, tags or metrics as rows.

    Raises:
        RefusedError: a record that is none of ours.
    """
    try:
        if "values" in record:
            return list(record["values"].items())
        time_ms, step = int(record["time_ms"]), int(record["step"])
        return [(prefix + name, float(value), time_ms, step) for name, value in record["metrics"].items()]
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise RefusedError(f"not a record of ours: {error!r}") from error


def root_cause(error: BaseException) -> BaseException:
    """The innermost error: of a socket or SQLite, under the layers that name the request."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return error


def one_line(error: BaseException) -> str:
    """An error's first line, at most 200 characters; a server may have answered anything."""
    return printable((str(error).strip().splitlines() or [type(error).__name__])[0][:200])
