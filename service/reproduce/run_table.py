"""A reproduction carried out: its sweeps one after the other, each where an earlier call has left it, and then the comparison."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from service.report import reporter
from service.reproduce.plan import Part, Request
from service.reproduce.table import Table
from service.reproduce.teacher_accuracy import Known, known_of, measured
from service.reproduce.verdict import Verdict, judge
from service.runs.preflight import check_checkpoints
from service.runs.result import TrialRow, read_result
from service.runs.run_directory import begin, reopen
from service.sweeps.preflight import check_sweep
from service.sweeps.sweep import sweep
from trainables.data.source import open_source
from trainables.errors import ExperimentError, TrainingError
from trainables.rundir import RunDir, write_json


@dataclass(frozen=True)
class Reproduction:
    """What is run, and where."""

    table: Table
    request: Request
    parts: Sequence[Part]
    changed: Sequence[str]
    """Why no accuracy can be held against a published one: keys that were set."""
    out: Path
    root: Path
    """Of the records."""

    def run_dir(self, part: Part) -> RunDir:
        return RunDir(self.out / part.name)


@dataclass(frozen=True)
class Cell:
    """A published number, and what came of it here."""

    pair: str
    column: str
    verdict: Verdict
    failed: str = ""
    """Why a seed has no accuracy."""


def check_same(job: Reproduction) -> None:
    """Refuse a folder of other runs, whose accuracies would stand for these.

    Raises:
        ExperimentError: one line.
    """
    for part in job.parts:
        run_dir = job.run_dir(part)
        if run_dir.result.exists() and reopen(run_dir.root, to_continue=True)[0].experiment != part.resolved.experiment:
            raise ExperimentError(
                f"{run_dir.root} holds other runs than these: give the command as it was, or choose another --out"
            )


def prepare(job: Reproduction) -> None:
    """Refuse what cannot be run, before the first sweep starts.

    Raises:
        DistillError: one line.
    """
    for part in job.parts:
        run_dir = job.run_dir(part)
        if run_dir.result.exists():
            check_checkpoints(run_dir)
        else:
            check_sweep(part.resolved)


def size_differences(job: Reproduction) -> list[str]:
    """How the data differs from the table's. Raises DataError where it cannot be opened."""
    data = job.parts[0].resolved.experiment.data
    train, val = (open_source(data, split) for split in ("train", "val"))
    found = {"train_images": len(train), "val_images": len(val), "num_classes": len(train.classes)}
    return [f"{key} {found[key]} for {wanted}" for key, wanted in job.table.data.model_dump().items() if found[key] != wanted]


def run_parts(job: Reproduction, say: Callable[[str], None]) -> list[str]:
    """Run what is left. Returns one line for each sweep that ended without an accuracy; the others go on all the same.

    Raises:
        DistillError: a teacher cannot be measured, or a sweep is in another process's hands.
        KeyboardInterrupt: after everything was put away; the same call goes on.
    """
    failed = []
    for part in job.parts:
        run_dir = job.run_dir(part)
        experiment = part.resolved.experiment
        if not run_dir.result.exists():
            run_dir.root.mkdir(parents=True, exist_ok=True)
            begin(part.resolved, "sweep", run_dir, job.root)
        _, _, result = reopen(run_dir.root, to_continue=True)
        if result.status == "complete":
            say(f"{part.name}: complete")
            continue
        if experiment.teacher is not None and experiment.teacher.weights is not None:
            known = measured(experiment, run_dir, job.root)
            say(f"{part.name}: the teacher given has {known.top1_pct:.2f}%, published {published_teacher(job.table, part):.2f}%")
        try:
            sweep(part.resolved, run_dir, reporter)
        except TrainingError as error:
            failed.append(f"{part.name}: {error}")
    return failed


def published_teacher(table: Table, part: Part) -> float:
    """In percent."""
    assert part.teacher is not None
    return table.teachers.models[part.teacher].top1_pct


def cells(job: Reproduction) -> list[Cell]:
    """Every published number that was asked for beside what there is of it so far."""
    rows = {part.name: _rows(job.run_dir(part)) for part in job.parts}
    found = []
    for pair, column in job.request.cells(job.table):
        student = job.table.pairs[pair].student
        part = next(
            part for part in job.parts if (student, column) in part.rows and part.teacher in (None, job.table.pairs[pair].teacher)
        )
        trials = [rows[part.name][trial] for trial in part.rows[student, column] if trial in rows[part.name]]
        done = [trial.metrics for trial in trials if trial.status == "ok"]
        source = job.table.source_of(column)
        published = job.table.published(pair, column)
        assert published is not None
        verdict = judge(
            published,
            source.epoch,
            job.table.num_runs(pair, column),
            job.table.tolerance_pct,
            [m["top1_pct"] for m in done],
            [m["best_top1_pct"] for m in done],
            num_wanted=len(job.request.seeds),
            comparable=not job.changed,
        )
        reasons = [trial.reason for trial in trials if trial.status in ("failed", "oom", "infeasible")]
        found.append(Cell(pair, column, verdict, reasons[0] if reasons else ""))
    return found


def _rows(run_dir: RunDir) -> dict[str, TrialRow]:
    """The trials of a sweep by their ids, as far as they are written."""
    if not run_dir.result.exists():
        return {}
    return {row.id: row for row in read_result(run_dir.result, run_dir.experiment).rows}


def teachers_of(job: Reproduction) -> dict[str, Known | None]:
    """What is known of each teacher so far."""
    return {part.teacher: known_of(part.resolved.experiment, job.run_dir(part)) for part in job.parts if part.teacher is not None}


def write_result(job: Reproduction, name: str) -> Path:
    """`reproduce.json`: every cell and teacher, with what was changed."""
    path = job.out / "reproduce.json"
    write_json(
        path,
        {
            "table": name,
            "title": job.table.title,
            "seeds": list(job.request.seeds),
            "changed": list(job.changed),
            "tolerance_pct": job.table.tolerance_pct,
            "sources": {key: source.model_dump() for key, source in job.table.sources.items()},
            "teachers": {
                key: {"published_pct": job.table.teachers.models[key].top1_pct, **(asdict(known) if known else {})}
                for key, known in teachers_of(job).items()
            },
            "cells": [asdict(cell) for cell in cells(job)],
        },
    )
    return path


def seconds_left(job: Reproduction, images_per_s: float | None) -> float | None:
    """How long what is left takes, one run after the other: at that speed, or as the runs took that have ended, by their epochs.

    None: neither is known.
    """
    took_s, took_epochs, all_epochs = 0.0, 0, 0
    for part in job.parts:
        points = part.resolved.experiment.sweep.points
        all_epochs += part.num_epochs
        for trial, row in _rows(job.run_dir(part)).items():
            if row.status == "ok":
                took_s += row.seconds
                took_epochs += part.epochs_of(points[int(trial)])
    if images_per_s is not None:
        return (all_epochs - took_epochs) * job.table.data.train_images / images_per_s
    return (all_epochs - took_epochs) * took_s / took_epochs if took_epochs else None
