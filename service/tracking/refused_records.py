"""Records that a store will never take: set aside with their reasons, so that they do not hold up those behind them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from service.tracking.spool import Cursor, RefusedError, Spool
from trainables.errors import printable
from trainables.redact import redact

if TYPE_CHECKING:
    from service.tracking.mlflow_store import Store

log = logging.getLogger("raydistill")


class RefusedRecords:
    """What one store refuses of one spool. `name`: the run directory as the user names it."""

    def __init__(self, spool: Spool, cursor: Cursor, name: str) -> None:
        self._spool, self._cursor, self._name = spool, cursor, name
        self._is_logged = False
        self._again: list[dict[str, Any]] | None = None
        """While refused records are sent again: those that were refused again."""

    def run_id(self, key: str) -> str:
        """The store's id of run `key`. Raises RefusedError: it was not begun, or the store takes nothing for it."""
        if reason := self._cursor.refused_runs.get(key):
            raise RefusedError(reason)
        if key not in self._cursor.runs:
            raise RefusedError(f"no run {key!r} was begun")
        return self._cursor.runs[key]

    def is_run_open(self, key: str) -> bool:
        """Whether the run was begun, and the store takes records of it."""
        return key in self._cursor.runs and key not in self._cursor.refused_runs

    def handle_refusal(self, store: Store, key: str, refusal: RefusedError, *, begins: bool = False) -> str:
        """Why a record of run `key` is refused.

        If the store refuses the whole run (it or its experiment was deleted, or it was not created), that is remembered, and its
        later records are set aside without a request. `begins`: the record is the run's first one, without which the store takes
        nothing for it.
        """
        runs, run_id, again = self._cursor.refused_runs, self._cursor.runs.get(key), f"distill sync {self._name}"
        if key in runs:
            return runs[key]
        if store.is_experiment_deleted():
            self._refuse_run(key, f"experiment {store.experiment!r} was deleted in MLflow: {again} restores it, with its runs")
        elif run_id and (state := store.run_state(run_id)) == "deleted":
            self._refuse_run(key, f"run {run_id} ({key}) was deleted in MLflow: restore it there, then {again}")
        elif run_id and state == "gone":
            anew = f"remove sent.json and refused.jsonl in {self._spool.root}, and {again} sends everything as a new one"
            self._refuse_run(key, f"run {run_id} ({key}) is gone from MLflow for good: {anew}")
        elif begins:
            self._refuse_run(key, f"MLflow's run of {key} cannot be begun: {one_line(refusal)}")
        return runs.get(key) or one_line(refusal)

    def _refuse_run(self, key: str, reason: str) -> None:
        """From now on all records of a run are set aside without a request."""
        if reason not in self._cursor.refused_runs.values():
            log.warning("tracking: %s; its records are in %s", reason, self._spool.refused)
        self._cursor.refused_runs[key] = reason

    def set_aside(self, records: Sequence[Mapping[str, Any]], reason: str) -> None:
        """Keep records that the store refuses for good. The first one is logged, unless its run was."""
        if not self._is_logged and reason not in self._cursor.refused_runs.values():
            log.warning("tracking: a record cannot be sent (%s); such records are in %s", reason, self._spool.refused)
        self._is_logged = True
        refused = [{**record, "reason": redact(reason)} for record in records]
        if self._again is None:
            self._spool.set_aside(refused)
        else:
            self._again += refused

    @contextlib.contextmanager
    def resending(self) -> Iterator[list[dict[str, Any]]]:
        """The records that were refused before, to be sent again: a run may have been restored, a server fixed.

        What is refused again replaces them at the end: cut short, this begins anew the next time.
        """
        self._cursor.refused_runs.clear()
        self._again = []
        try:
            yield self._spool.refused_records()
            self._spool.replace_refused(self._again)
        finally:
            self._again = None


def one_line(error: BaseException) -> str:
    """An error's first line, at most 200 characters; a server may have answered anything."""
    return printable((str(error).strip().splitlines() or [type(error).__name__])[0][:200])
