"""Sends a log's runs to an MLflow store. The sync thread imports it late, as MLflow takes seconds to import."""

import contextlib
import getpass
import logging
import os
import re
import time
import zlib
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import requests
from mlflow import MlflowClient, MlflowException
from mlflow.entities import Dataset, DatasetInput, InputTag, Metric, Param, RunTag, ViewType
from mlflow.utils import get_results_from_paginated_fn
from mlflow.utils.credentials import get_default_host_creds
from mlflow.utils.rest_utils import http_request

from service.tracking.logged_model import log_model
from service.tracking.run_view import KEY_TAG, Item, LogView, RunView, SyncState
from service.tracking.stores import reason_of
from service.tracking.views import VIEW_TAG, VIEWS_SINCE
from trainables.errors import CheckpointError, ModelError, first_line, first_three
from trainables.locks import locked
from trainables.redact import redact
from trainables.rundir import RunDir, create_private, lines_after

CHUNK_BYTES = 1 << 16
"""Bytes of a log that are read and sent at a time. At most this much is sent again after a kill."""
LINE_BYTES = 1 << 12
POSITION_TAG = "raydistill.position"
REFUSALS = {"INVALID_PARAMETER_VALUE", "RESOURCE_DOES_NOT_EXIST", "RESOURCE_ALREADY_EXISTS", "INVALID_STATE", "MALFORMED_REQUEST"}
READ_ONLY = {"PERMISSION_DENIED", "UNAUTHENTICATED", "ENDPOINT_NOT_FOUND"}
REFUSED_STATUS = {400, 411, 413, 414, 415, 422}
MAX_NAME, MAX_PARAM, MAX_TAG = 250, 6000, 5000
FILES = ("artifact", "model")

log = logging.getLogger("raydistill")
# MLflow also logs a stack trace for each error that it raises; users get one line from us instead.
for _name in ("mlflow", "alembic"):
    logging.getLogger(_name).setLevel(logging.CRITICAL + 1)

Row = tuple[str, tuple[Any, ...]]
"""`params`, `tags` or `metrics`, with (name, value) of a parameter or tag, or (name, value, unix ms, step) of a metric."""


class _DeletedError(Exception):
    """A run is deleted in MLflow; the message names it."""


@dataclass
class _RemoteRun:
    """The state of an MLflow run when it was last listed or written."""

    key: str
    run_id: str
    position: int = 0
    """Offset in the log up to which the run is sent."""
    status: str = "RUNNING"
    tags: dict[str, str] = field(default_factory=dict)
    params: set[str] | None = field(default_factory=set)
    """Names of the parameters that it has, or None once all were sent: in MLflow a parameter cannot change."""
    is_deleted: bool = False


class Sender:
    """Sends one log to one store. After an error it must not be used again: a new one asks the store anew what it has."""

    def __init__(self, run_dir: RunDir, state: SyncState, view: LogView, refused: dict[str, set[Any]]) -> None:
        """Connect, creating the database and the experiment if needed, and list the runs that the store has.

        `view` is a new one. `refused` collects by reason what the store rejects for good.
        """
        self._run_dir, self._state, self._view, self._refused = run_dir, state, view, refused
        artifacts = None
        if state.uri.startswith("sqlite:///"):
            database = Path(state.uri.removeprefix("sqlite:///"))
            artifacts = (database.parent / "mlartifacts").as_uri()
            create_database(database, artifacts)
        elif not state.uri.startswith(("http", "databricks")):
            # MLflow's default is below the working directory.
            artifacts = (run_dir.root.parent / "mlartifacts").absolute().as_uri()
        self._client = MlflowClient(tracking_uri=state.uri, registry_uri=state.uri)
        state.experiment_id = open_experiment(self._client, state.experiment, artifacts)
        self._log_id = (lines_after(run_dir.events, 0, LINE_BYTES)[0].record or {})["id"]
        self._end, self._mark = 0, ""
        """Where the view ends in the log, and what identifies the last line before."""
        self._upload_trouble = ""
        self.num_accepted = 0
        self._known = self._list_runs()

    def send(self, *, is_last: bool, until_s: float) -> str:
        """Send all new events, and begin with no run after `until_s`. Returns why files could not be sent, or "".

        `is_last`: the files that a run writes at its end are complete. Raises any error of the store, or of the log.
        """
        self._upload_trouble, deleted = "", dict[str, None]()
        has_read = True
        while has_read:
            has_read = self._read()
            for run in self.unsent():
                if time.monotonic() > until_s:
                    return ""
                try:
                    self._send(run, is_last=is_last)
                except _DeletedError as error:
                    deleted[str(error)] = None
        if deleted:
            raise RuntimeError(f"deleted in MLflow, so restore there: {first_three(list(deleted))}")
        if self._upload_trouble:
            num = sum(item.kind in FILES for run in self.unsent() for item in run.items)
            return f"lacks {num} artifact{'s' * (num > 1)}: {self._upload_trouble}"
        if is_last:
            self._list_runs()  # deletes duplicates
        if not self.unsent() and self._end != self._state.position:
            self._state.position = self._end
            self._state.write(self._run_dir)
        return ""

    def unsent(self) -> list[RunView]:
        """Return the runs of which the store does not have everything that was read."""
        return [run for run in self._view.runs.values() if self._is_unsent(run)]

    def _is_unsent(self, run: RunView) -> bool:
        known = self._known.get(run.key)
        if known is None or not known.position:
            return True
        if self._end <= known.position:  # the store is ahead of the view
            return False
        has_items = bool(run.items) and run.items[-1].end > known.position
        return has_items or run.status != known.status or not run.tags.items() <= known.tags.items()

    def _read(self) -> bool:
        """Read the next part of the log. Returns whether there was one."""
        lines = lines_after(self._run_dir.events, self._end, CHUNK_BYTES)
        for line in lines:
            self._view.take(line)
            self._mark, self._end = f"{self._end}:{zlib.crc32(line.raw):08x}", line.end
        return bool(lines)

    def _offset_of(self, mark: str) -> int:
        """Return the end offset of the line that a mark names, or 0 if the log does not have that line there.

        The store may have events that a run in an object store has lost with the driver's node.
        """
        begin, _, checksum = mark.partition(":")
        line = next(iter(lines_after(self._run_dir.events, int(begin), LINE_BYTES)), None) if begin.isdecimal() else None
        return line.end if line is not None and f"{zlib.crc32(line.raw):08x}" == checksum else 0

    def _list_runs(self) -> dict[str, _RemoteRun]:
        """List the log's runs by key, including deleted ones that can be restored.

        A request that the store got to only after its repetition has created a duplicate: the one that is behind is deleted.
        """

        def page(size: int, token: str | None) -> Any:
            named = f"tags.`{KEY_TAG}` LIKE '{self._log_id}/%'"
            return self._client.search_runs([self._state.experiment_id], named, ViewType.ALL, size, page_token=token)

        found, known = [], dict[str, _RemoteRun]()
        for run in get_results_from_paginated_fn(page, 1000):
            info, tags = run.info, dict(run.data.tags)
            key, position = tags[KEY_TAG].removeprefix(f"{self._log_id}/"), self._offset_of(tags.get(POSITION_TAG, ""))
            params = None if position else set(run.data.params)
            found.append(_RemoteRun(key, info.run_id, position, info.status, tags, params, info.lifecycle_stage != "active"))
        for each in sorted(found, key=lambda one: (one.is_deleted, -one.position)):
            if known.setdefault(each.key, each) is not each and not each.is_deleted:
                self._client.delete_run(each.run_id)
        return known

    def _send(self, run: RunView, *, is_last: bool) -> None:
        """Send what is new in a run: metrics, then its files, its status, and last its position."""
        known = self._known.get(run.key) or self._create(run)
        if known.is_deleted:
            raise _DeletedError(f"run {known.run_id} ({run.key})")
        while run.items and run.items[0].end <= known.position:
            run.items.popleft()
        self._log(run, known)
        if is_last or run.parent is not None or run.status == "RUNNING":  # else the run's page is not written yet
            self._send_files(run, known)
        if run.status != known.status:
            self._request(known, ("status",), partial(self._set_status, run, known.run_id))
            known.status = run.status
        if run.items:  # pending files: keep the old position, from which another process would have to send again
            return
        position = (known.run_id, POSITION_TAG, self._mark)
        self._request(known, ("position",), partial(self._client.set_tag, *position, synchronous=True))
        known.position = self._end

    def _create(self, run: RunView) -> _RemoteRun:
        tags = {KEY_TAG: f"{self._log_id}/{run.key}", "mlflow.source.name": "raydistill", "mlflow.source.type": "LOCAL"}
        with contextlib.suppress(KeyError, OSError):  # a container may have no name for its user
            tags["mlflow.user"] = getpass.getuser()
        if run.parent is not None:
            parent = self._known[run.parent]
            if parent.is_deleted:
                raise _DeletedError(f"run {parent.run_id} ({run.parent})")
            tags["mlflow.parentRunId"] = parent.run_id
        made = self._client.create_run(self._state.experiment_id, start_time=run.began_ms, tags=tags, run_name=run.name)
        self._known[run.key] = _RemoteRun(run.key, made.info.run_id)
        return self._known[run.key]

    def _set_status(self, run: RunView, run_id: str) -> None:
        if run.status == "RUNNING":
            self._client.update_run(run_id, status=run.status)
        else:
            self._client.set_terminated(run_id, run.status, run.ended_ms)

    def _refusal_of(self, known: _RemoteRun, request: Callable[[], Any]) -> str:
        """Make a request about a run. Returns why the store rejects it for good, or "".

        Raises _DeletedError, or any error after which the request may be repeated.
        """
        try:
            request()
        except Exception as error:
            if not (reason := refusal(error)):
                raise
            if self._client.get_run(known.run_id).info.lifecycle_stage != "active":
                raise _DeletedError(f"run {known.run_id} ({known.key})") from error
            return reason
        self.num_accepted += 1
        return ""

    def _request(self, known: _RemoteRun, what: tuple[Any, ...], request: Callable[[], Any]) -> None:
        """Make a request, and count `what` if the store rejects it for good. Raises as `_refusal_of` does."""
        if reason := self._refusal_of(known, request):
            if reason not in self._refused:
                log.warning("tracking: skipped %s of %s: %s", redact(what[0]), known.key, redact(reason))
            self._refused.setdefault(reason, set()).add((known.key, what))

    def _log(self, run: RunView, known: _RemoteRun) -> None:
        """Send the metrics, and the parameters and tags that the store lacks."""
        params = {} if known.params is None else run.params()
        rows: list[Row] = [("params", item) for item in params.items() if item[0] not in (known.params or ())]
        rows += [("tags", item) for item in run.tags.items() if known.tags.get(item[0]) != item[1]]
        rows += [("metrics", item.value) for item in run.items if item.kind == "metrics"]
        self._log_rows(known, rows)
        known.params, known.tags = None, dict(run.tags)
        run.items = deque(item for item in run.items if item.kind != "metrics")

    def _log_rows(self, known: _RemoteRun, rows: list[Row]) -> None:
        """Send rows at once. If they are rejected, send each half, until each rejected row is found and skipped."""
        entities = {kind: [entity(kind, *row) for of, row in rows if of == kind] for kind in ("params", "tags", "metrics")}
        request = partial(self._client.log_batch, known.run_id, **entities, synchronous=True)
        if len(rows) == 1:
            self._request(known, rows[0][1], request)
        elif rows and self._refusal_of(known, request):
            for half in (rows[: len(rows) // 2], rows[len(rows) // 2 :]):
                self._log_rows(known, half)

    def _send_files(self, run: RunView, known: _RemoteRun) -> None:
        """Send a run's files and other objects. After one file fails no more are tried: the server may have no artifact store."""
        for item in list(run.items):
            if item.kind in FILES and self._upload_trouble:
                continue
            try:
                self._request(known, (item.kind,), partial(self._send_item, item, known))
            except Exception as error:
                if item.kind not in FILES or isinstance(error, _DeletedError):
                    raise
                self._upload_trouble = reason_of(error)
            else:
                run.items.remove(item)

    def _send_item(self, item: Item, known: _RemoteRun) -> None:
        match item.kind:
            case "dataset":
                context = [InputTag("mlflow.data.context", "training")]
                self._client.log_inputs(known.run_id, [DatasetInput(Dataset(**item.value), context)])  # ignores repetitions
            case "views":
                if reason := add_views(self._client, self._state, item.value):
                    log.warning("tracking: %s has no saved views of the trials: %s", redact(self._state.uri), reason)
                else:
                    self._state.views = list(item.value)
            case "artifact":
                if not item.value.exists():
                    raise CheckpointError(f"{item.value} no longer exists")
                self._client.log_artifact(known.run_id, str(item.value))
            case "model":
                fetch, registered = item.value
                log_model(self._client, self._client.get_run(known.run_id), fetch(), registered, self._run_dir.root)


def open_experiment(client: MlflowClient, name: str, artifacts: str | None) -> str:
    """Return the id of an experiment, which is created or restored if needed."""
    found = client.get_experiment_by_name(name)
    if found is None:
        try:
            return str(client.create_experiment(name, artifact_location=artifacts))
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":  # another process has just created it
                raise
        return open_experiment(client, name, artifacts)
    if found.lifecycle_stage == "deleted":
        client.restore_experiment(found.experiment_id)
        log.warning("tracking: restored experiment %r, which was deleted in MLflow, with its runs", name)
    return str(found.experiment_id)


def refusal(error: Exception) -> str:
    """Return why the store will never accept what failed with `error`, or "" if it may accept it later."""
    if isinstance(error, CheckpointError | ModelError):
        return first_line(error)
    is_refused = isinstance(error, MlflowException) and error.error_code in REFUSALS
    if isinstance(error, requests.HTTPError) and error.response is not None:
        is_refused = error.response.status_code in REFUSED_STATUS
    return f"MLflow refuses it: {first_line(error)}" if is_refused else ""


def entity(kind: str, name: str, value: Any, *rest: int) -> Metric | Param | RunTag:
    """Return MLflow's entity of a row, with its name and text as MLflow allows."""
    name = re.sub(r"[^\w.\- :/]", "_", name)[:MAX_NAME]
    if kind == "metrics":
        return Metric(name, value, *rest)
    return Param(name, value[:MAX_PARAM]) if kind == "params" else RunTag(name, value[:MAX_TAG])


def add_views(client: MlflowClient, state: SyncState, views: Mapping[str, str]) -> str:
    """Save the views (key → value, see `saved_views`) that the experiment lacks. Returns why that is impossible, or ""."""
    if state.uri.startswith("databricks"):
        return "Databricks does not show them"
    try:
        tags = client.get_experiment(state.experiment_id).tags  # raises if the server is down
        if state.uri.startswith("http"):
            answer = http_request(get_default_host_creds(state.uri), "/version", "GET", raise_on_status=False, max_retries=0)
            number = re.match(r"(\d+)\.(\d+)[\w.]*", answer.text if answer.ok else "")
            if number is None or tuple(map(int, number.groups())) < VIEWS_SINCE:
                found = number.group() if number else "of unknown version"
                return f"they need MLflow {'.'.join(map(str, VIEWS_SINCE))}, and the server is {found}"
        for key in views.keys() - {name.removeprefix(VIEW_TAG) for name in tags}:
            client.set_experiment_tag(state.experiment_id, VIEW_TAG + key, views[key])
    except MlflowException as error:
        if error.error_code in REFUSALS | READ_ONLY:
            return first_line(error)
        raise
    return ""


def create_database(path: Path, artifacts: str) -> None:
    """Create a new SQLite store. Processes that start together create it once.

    It is created under another name and renamed, since a kill between two of MLflow's migrations makes a database unusable.
    """
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    create_private(path.parent)
    with locked(path.with_name(f"{path.name}.lock")):
        if path.exists() and path.stat().st_size:
            return
        temporary = path.with_name(f".{path.name}.new")
        temporary.unlink(missing_ok=True)
        SqlAlchemyStore(f"sqlite:///{temporary}", artifacts).engine.dispose()  # type: ignore[no-untyped-call]
        os.replace(temporary, path)
