"""A run's log as a driver and its workers write it, and what stands in the MLflow store, asked of the database itself."""

import contextlib
import sqlite3
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from service.config.experiment import load
from service.runs.event_log import EventLog
from service.runs.events import Event, event
from service.runs.mlflow_view import MlflowView
from service.runs.result import Kind
from service.runs.run_directory import begin_run
from service.tracking.stores import default_uri
from service.tracking.sync import Delivery, Syncing, sync
from trainables.rundir import RunDir, lines_after

FIRST_MS = 1_700_000_000_000


class Run:
    """A run with a log of its own, of which MLflow has an experiment of its own."""

    def __init__(self, run_dir: RunDir, uri: str, kind: Kind = "train", changes: Iterable[str] = ()) -> None:
        begin_run(load("digits", list(changes)), kind, run_dir, run_dir.root.parent)
        self.run_dir, self.uri, self.kind = run_dir, uri, kind
        self.add(event("session_begun", tags={"raydistill.commit": "abc123"}))
        if kind == "sweep":
            self.change(space={}, metric="top1_pct", mode="max")

    def add(self, *events: Event) -> None:
        """Append events to the log."""
        with contextlib.closing(EventLog(self.run_dir.events)) as log:
            log.append(events)

    def add_epochs(self, steps: range, stage: str = "student") -> None:
        self.add(*(epoch(step, stage) for step in steps))

    def change(self, **changes: Any) -> None:
        self.add(event("result", changes=changes))

    def end(self, status: str = "complete") -> None:
        self.add(event("session_ended", status=status, reason=""))

    def sync(self, **options: Any) -> Delivery:
        return sync(self.run_dir, self.uri, self.run_dir.root.name, MlflowView, **options)

    def syncing(self) -> Syncing:
        return Syncing(self.run_dir, self.uri, self.run_dir.root.name, MlflowView, poll_s=0.05)

    @property
    def tag(self) -> str:
        record = lines_after(self.run_dir.events, 0)[0].record
        assert record is not None
        return str(record["id"])


def epoch(step: int, stage: str = "student", metrics: Mapping[str, float] | None = None) -> Event:
    values = metrics or {"epoch/train/loss": 1 / (step + 1), "epoch/images_per_s": 100.0 + step}
    return event("epoch", stage, step=step, epoch=0.5, metrics=values) | {"time_ms": FIRST_MS + step}


def row(trial: str, kind: str = "accuracy", status: str = "pending", **params: Any) -> dict[str, Any]:
    """A row of a sweep as the driver records it."""
    scale = {"scale.num_workers": 1, "data.global_batch_size": 64, "data.loader_workers": 2}
    return {"id": trial, "params": params, "kind": kind, "scale": scale, "status": status}


def query(runs_root: Path, sql: str, *values: Any) -> list[tuple[Any, ...]]:
    with contextlib.closing(sqlite3.connect(runs_root / "mlflow.db", timeout=20)) as store:
        return store.execute(sql, values).fetchall()


def run_of(runs_root: Path, run: Run, key: str = "train") -> tuple[str, str, int]:
    """(id, status, end time) of the one run of `key`."""
    found = query(
        runs_root,
        """SELECT r.run_uuid, r.status, r.end_time FROM runs r
        JOIN tags k ON k.run_uuid = r.run_uuid AND k.key = 'raydistill.key' AND k.value = ? WHERE r.lifecycle_stage = 'active'""",
        f"{run.tag}/{key}",
    )
    assert len(found) == 1
    return found[0]


def metrics_of(runs_root: Path, run_id: str, name: str) -> list[tuple[int, float, int]]:
    """(step, value, unix ms) in the order in which the store took them."""
    return query(
        runs_root, "SELECT step, value, timestamp FROM metrics WHERE run_uuid = ? AND key = ? ORDER BY rowid", run_id, name
    )


def uri_of(runs_root: Path) -> str:
    return default_uri(runs_root)
