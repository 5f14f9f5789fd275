"""A reproduction: its sweeps one after the other, each continued where an earlier call has stopped, and the comparison."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from service.report import end_of_run
from service.reproduce.sweeps import PlannedSweep, Request
from service.reproduce.table import Table
from service.reproduce.teacher_accuracy import TeacherAccuracy, measure_teacher, teacher_accuracy
from service.reproduce.verdict import Verdict, compare_accuracy
from service.runs.preflight import check_checkpoints
from service.runs.result import TrialRow
from service.runs.run_directory import begin_run, reopen
from service.runs.run_log import read_log
from service.sweeps.preflight import check_sweep
from service.sweeps.sweep import sweep
from trainables.config import DataIdentity
from trainables.data.source import open_source
from trainables.errors import ExperimentError, TrainingError
from trainables.rundir import RunDir, create_private, write_json


@dataclass(frozen=True)
class Reproduction:
    """What is run, and where."""

    table: Table
    request: Request
    sweeps: Sequence[PlannedSweep]
    changed: Sequence[str]
    """Why no accuracy is comparable to a published one: keys that were set, data of another size."""
    out: Path
    root: Path
    """Of the records."""

    def run_dir(self, planned: PlannedSweep) -> RunDir:
        return RunDir(self.out / planned.name)


@dataclass(frozen=True)
class Cell:
    """A published number, and our accuracy."""

    pair: str
    column: str
    verdict: Verdict
    failed: str = ""
    """Why a seed has no accuracy."""


def check_same(job: Reproduction) -> None:
    """Refuse a folder of other runs, whose accuracies would be taken for these. Raises ExperimentError."""
    for planned in job.sweeps:
        run_dir = job.run_dir(planned)
        if run_dir.events.exists() and reopen(run_dir.root, to_continue=True)[0].experiment != planned.resolved.experiment:
            raise ExperimentError(
                f"{run_dir.root} holds other runs than these: give the command as it was, or choose another --out"
            )


def prepare(job: Reproduction) -> DataIdentity | None:
    """Refuse what cannot be run, before the first sweep starts. Returns what the data of all is. Raises DistillError."""
    data = None
    for planned in job.sweeps:
        _, data = check_sweep(planned.resolved)
        if (run_dir := job.run_dir(planned)).events.exists():
            _, _, result = reopen(run_dir.root)
            check_checkpoints(run_dir, result)
            if result.data not in (None, data):
                raise ExperimentError(f"{run_dir.root} holds runs on other data: restore it, or choose another --out")
    return data


def size_differences(job: Reproduction) -> list[str]:
    """How the data differs from the table's. Raises DataError where it cannot be opened."""
    data = job.sweeps[0].resolved.experiment.data
    train, val = (open_source(data, split) for split in ("train", "val"))
    sizes = {"train_images": len(train), "val_images": len(val), "num_classes": len(train.classes)}
    published = job.table.data.model_dump()
    return [f"{key} {sizes[key]} for {number}" for key, number in published.items() if sizes[key] != number]


def run_sweeps(job: Reproduction, data: DataIdentity | None, log: Callable[[str], None]) -> list[str]:
    """Run the sweeps that are not complete, on `data`. Returns one line for each that failed; the others are run all the same.

    Raises:
        DistillError: a teacher cannot be measured, or another process runs a sweep.
        KeyboardInterrupt: everything is saved; the same call continues.
    """
    failed = []
    for planned in job.sweeps:
        run_dir = job.run_dir(planned)
        experiment = planned.resolved.experiment
        if not run_dir.events.exists():
            create_private(job.root)
            run_dir.root.mkdir(parents=True, exist_ok=True)
            begin_run(planned.resolved, "sweep", run_dir, job.root)
        _, _, result = reopen(run_dir.root, to_continue=True)
        if result.status == "complete":
            log(f"{planned.name}: complete")
            continue
        if experiment.teacher is not None and experiment.teacher.weights is not None:
            ours = measure_teacher(experiment, run_dir, job.root).top1_pct
            published = job.table.teachers.models[experiment.teacher.model].top1_pct
            log(f"{planned.name}: the teacher given has {ours:.2f}%, published {published:.2f}%")
        try:
            sweep(planned.resolved, run_dir, end_of_run, data)
        except TrainingError as error:
            failed.append(f"{planned.name}: {error}")
    return failed


def cells(job: Reproduction) -> list[Cell]:
    """Every requested published number with what there is of it so far."""
    rows = {planned.name: _rows(job.run_dir(planned)) for planned in job.sweeps}
    return [_cell(job, pair, column, rows) for pair, column in job.request.cells(job.table)]


def _cell(job: Reproduction, pair: str, column: str, rows: dict[str, dict[str, TrialRow]]) -> Cell:
    """`rows`: of each sweep the rows that it has."""
    table = job.table
    student, teacher = table.pairs[pair].student, table.pairs[pair].teacher
    planned = next(p for p in job.sweeps if (student, column) in p.rows and p.teacher in (None, teacher))
    trials = [rows[planned.name][trial] for trial in planned.rows[student, column] if trial in rows[planned.name]]
    finished = [trial.metrics for trial in trials if trial.status == "ok"]
    published = table.published(pair, column)
    assert published is not None
    verdict = compare_accuracy(
        published,
        last=[metrics["top1_pct"] for metrics in finished],
        best=[metrics["best_top1_pct"] for metrics in finished],
        epoch=table.source_of(column).epoch,
        num_published=table.num_runs(pair, column),
        least_tolerance=table.tolerance_pct,
        num_seeds=len(job.request.seeds),
        comparable=not job.changed,
    )
    reasons = [trial.reason for trial in trials if trial.status in ("failed", "oom", "infeasible")]
    return Cell(pair, column, verdict, reasons[0] if reasons else "")


def _rows(run_dir: RunDir) -> dict[str, TrialRow]:
    """The trials of a sweep by their ids, as far as they are written."""
    if not run_dir.events.exists():
        return {}
    return {row.id: row for row in read_log(run_dir).result.rows}


def teachers_of(job: Reproduction) -> dict[str, TeacherAccuracy | None]:
    """The accuracy of each teacher; None: not known yet."""
    with_teacher = [(planned.teacher, planned) for planned in job.sweeps if planned.teacher is not None]
    return {teacher: teacher_accuracy(planned.resolved.experiment, job.run_dir(planned)) for teacher, planned in with_teacher}


def write_table_result(job: Reproduction, name: str) -> Path:
    """`reproduce.json`: every cell and teacher, with what was changed."""
    path = job.out / "reproduce.json"
    teachers = {
        key: {"published_pct": job.table.teachers.models[key].top1_pct, **(asdict(accuracy) if accuracy else {})}
        for key, accuracy in teachers_of(job).items()
    }
    result = {
        "table": name,
        "title": job.table.title,
        "seeds": list(job.request.seeds),
        "changed": list(job.changed),
        "tolerance_pct": job.table.tolerance_pct,
        "sources": {key: source.model_dump() for key, source in job.table.sources.items()},
        "teachers": teachers,
        "cells": [asdict(cell) for cell in cells(job)],
    }
    write_json(path, result)
    return path


def seconds_left(job: Reproduction, images_per_s: float | None) -> float | None:
    """How long the remaining epochs take, one run after the other: at this speed, or else at that of the finished runs.

    None: neither is known.
    """
    finished_s, finished_epochs, all_epochs = 0.0, 0, 0
    for planned in job.sweeps:
        points = planned.resolved.experiment.sweep.points
        all_epochs += planned.num_epochs
        for trial, row in _rows(job.run_dir(planned)).items():
            if row.status == "ok":
                finished_s += row.seconds
                finished_epochs += planned.epochs_of(points[int(trial)])
    remaining = all_epochs - finished_epochs
    if images_per_s is not None:
        return remaining * job.table.data.train_images / images_per_s
    return remaining * finished_s / finished_epochs if finished_epochs else None
