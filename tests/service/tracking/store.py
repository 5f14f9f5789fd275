"""What stands in the MLflow store, asked of the database itself; and what a worker records."""

import contextlib
import json
import sqlite3
from pathlib import Path
from typing import Any

from service.tracking.spool import Spool
from trainables.rundir import RunDir


def query(runs_root: Path, sql: str, *values: Any) -> list[tuple[Any, ...]]:
    with contextlib.closing(sqlite3.connect(runs_root / "mlflow.db", timeout=20)) as store:
        return store.execute(sql, values).fetchall()


RUN = """FROM runs r JOIN tags k ON k.run_uuid = r.run_uuid AND k.key = 'raydistill.key' AND k.value = ?
    WHERE r.lifecycle_stage = 'active'"""


def tag_of(run_dir: RunDir, key: str) -> str:
    target = Spool(run_dir).target()
    assert target is not None
    return f"{target.spool_id}/{key}"


def run_of(runs_root: Path, run_dir: RunDir, key: str) -> tuple[str, str, int]:
    """(id, status, end time) of the one run of `key`."""
    found = query(runs_root, f"SELECT r.run_uuid, r.status, r.end_time {RUN}", tag_of(run_dir, key))
    assert len(found) == 1
    return found[0]


def metrics_of(runs_root: Path, run_id: str, name: str) -> list[tuple[int, float, int]]:
    """(step, value, unix ms) in the order in which the store took them."""
    return query(
        runs_root, "SELECT step, value, timestamp FROM metrics WHERE run_uuid = ? AND key = ? ORDER BY rowid", run_id, name
    )


def write_steps(path: Path, steps: range) -> None:
    """What a worker records of epochs, without its fsync."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a") as file:
        for step in steps:
            values = {"epoch/train/loss": 1 / (step + 1), "epoch/images_per_s": 100.0 + step}
            record = {
                "kind": "epoch",
                "stage": "student",
                "step": step,
                "epoch": 0.5,
                "time_ms": 1_700_000_000_000 + step,
                "metrics": values,
            }
            file.write(json.dumps(record) + "\n")
