"""What is wrong with a job that faults have struck, held against one that none has."""

from __future__ import annotations

import contextlib
import itertools
import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from safetensors.torch import load_file

from service.runs.mlflow_view import MlflowView
from service.runs.run_log import RunLog
from service.tracking.run_view import SyncState
from service.tracking.shown_metrics import of_epoch, of_summary
from service.tracking.sync import sync
from tests.run_log import events_of
from tests.trainables.worker.test_reporter import learned, numbers_of, pairs
from trainables.locks import is_locked
from trainables.rundir import RunDir, StageDir, lines_after

TRACEBACK = "Traceback (most recent call last)"


def stage_losses(whole: StageDir, struck: StageDir) -> Iterator[str]:
    """Final parameters, optimizer and generators bit for bit; the same records, each number once a step; nothing left over."""
    for name in ("last", "best"):
        yield from tensor_losses(getattr(whole, name), getattr(struck, name))
    yield from record_losses(whole, struck)
    if not events_of(struck.root, "summary"):
        yield "no summary"


def tensor_losses(whole: Path, struck: Path) -> Iterator[str]:
    """Differences of two checkpoints."""
    if not struck.exists():
        yield f"no {struck.name}"
        return
    expected, found = load_file(whole), load_file(struck)
    if expected.keys() != found.keys():
        yield f"{struck.name} has other tensors: {sorted(expected.keys() ^ found.keys())[:3]}"
        return
    if different := [name for name, tensor in expected.items() if not torch.equal(tensor, found[name])]:
        yield f"{struck.name}: {len(different)} of {len(expected)} tensors differ, such as {different[0]}"


def record_losses(whole: StageDir, struck: StageDir) -> Iterator[str]:
    """Differences of two stages' numbers in their logs; how often the training was resumed is none."""
    lines = numbers_of(struck.root)
    if twice := [pair for pair, count in pairs(lines).items() if count > 1]:
        yield f"{len(twice)} numbers are on record twice, such as {twice[0]}"
    expected = [comparable(line) for line in numbers_of(whole.root)]
    found = [comparable(line) for line in lines if line["kind"] != "resume"]
    if missing := [line[:3] for line in expected if line[:2] not in {other[:2] for other in found}]:
        yield f"{len(missing)} records are lost, such as {missing[0]}"
    elif found != expected:
        # All that is missing is above: where these differ only in number, records came in addition.
        nothing: tuple[Any, ...] = (None, None, None, set(), {})
        both = itertools.zip_longest(found, expected, fillvalue=nothing)
        ours, theirs = next(pair for pair in both if pair[0] != pair[1])
        (*where, names, values), (*_, other_names, other_values) = ours, theirs
        yield f"records differ: {where} has other names {names ^ other_names} and numbers {values.items() ^ other_values.items()}"


def comparable(line: dict[str, Any]) -> tuple[Any, ...]:
    """See `learned`; without what depends on moments.

    A summary's phase times are those of the process that wrote it, which may have trained no step. An epoch has
    telemetry where a sample of it fell into it.
    """
    kind, step, epoch, names, values = learned(line)
    lasting = set() if kind == "summary" else {name for name in names if "/node" not in name}
    return kind, step, epoch, lasting, values


def cache_losses(whole: Path, struck: Path) -> Iterator[str]:
    """Differences of two folders of cached logits: the rows of every epoch, by sample."""
    expected, found = cached_rows(whole), cached_rows(struck)
    if missing := expected.keys() - found.keys():
        yield f"{len(missing)} of {len(expected)} cached rows are lost"
    if different := [key for key in expected.keys() & found.keys() if expected[key] != found[key]]:
        yield f"{len(different)} of {len(expected)} cached rows differ"


def cached_rows(cache: Path) -> dict[tuple[str, int], bytes]:
    """(key, epoch and sample) → its columns, of all blocks of a cache."""
    rows = dict[tuple[str, int], bytes]()
    for path in cache.rglob("*.arrow"):
        for row in pa.ipc.open_file(path.read_bytes()).read_all().to_pylist():
            rows[f"{path.parent.parent.name}/{path.parent.name}", row["sample"]] = repr(row).encode()
    return rows


def delivery_losses(database: Path, run_dir: RunDir, key: str, expected: set[tuple[str, int, float]]) -> Iterator[str]:
    """What one run's records in MLflow lack or have twice, after what waited for it was sent.

    `expected`: name, step and value of each metric.
    """
    state, (log, *_) = SyncState.read(run_dir), lines_after(run_dir.events, 0)
    assert state is not None
    assert log.record is not None
    sync(run_dir, state.uri, state.experiment, MlflowView)
    with contextlib.closing(sqlite3.connect(database, timeout=60)) as store:
        runs = store.execute(
            """SELECT r.run_uuid, r.status FROM runs r JOIN tags k ON k.run_uuid = r.run_uuid AND k.key = 'raydistill.key'
            WHERE k.value = ? AND r.lifecycle_stage = 'active'""",
            (f"{log.record['id']}/{key}",),
        ).fetchall()
        if [status for _, status in runs] != ["FINISHED"]:
            yield f"MLflow has the runs {runs} for {key}, and not one that is FINISHED"
            return
        rows = store.execute("SELECT key, step, value FROM metrics WHERE run_uuid = ?", (runs[0][0],)).fetchall()
    if len(rows) != len({row[:2] for row in rows}):
        yield f"MLflow has {len(rows) - len({row[:2] for row in rows})} numbers twice"
    if missing := expected - {(name, step, value) for name, step, value in rows}:
        yield f"MLflow lacks {len(missing)} of {len(expected)} numbers, such as {min(missing)}"


def sent_numbers(run_dir: RunDir, stage: str = "student") -> set[tuple[str, int, float]]:
    """What MLflow gets of a student's epochs, and of its summary."""
    log = RunLog(run_dir.events)
    shown = [(each["step"], of_epoch(each["metrics"], "")) for each in log.of_stage(stage, "epoch")]
    shown += [(each["step"], of_summary(each["metrics"], followed=True)) for each in log.of_stage(stage, "summary")]
    return {(name, step, value) for step, values in shown for name, value in values.items() if value == value}


def lock_losses(folder: Path) -> Iterator[str]:
    """Locks below a folder that somebody still has."""
    for path in folder.rglob("*.lock"):
        if is_locked(path):
            yield f"{path} is still locked"


def status_of(run_dir: RunDir) -> dict[str, Any]:
    """What a run or sweep has recorded of itself; {} where it has nothing yet."""
    return dict(json.loads(run_dir.result.read_text())) if run_dir.result.exists() else {}
