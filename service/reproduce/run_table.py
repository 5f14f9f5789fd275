"""A reproduction: its sweeps one after the other, each continued where an earlier call has stopped, and the comparison."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from service.report import end_of_run
from service.reproduce.sweeps import PlannedSweep, Request
from service.reproduce.table import Table
from service.reproduce.verdict import Verdict, compare_accuracy
from service.runs.preflight import check_checkpoints, check_data_of_run
from service.runs.result import RunResult, TrialRow
from service.runs.run_directory import begin_run, check_same, has_begun, reopen
from service.runs.run_log import read_log
from service.sweeps.preflight import check_sweep
from service.sweeps.sweep import sweep
from trainables.config import DataIdentity
from trainables.data.source import open_source
from trainables.errors import TrainingError
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

    def run_dir(self, planned: PlannedSweep) -> RunDir:
        return RunDir(self.out / planned.name)

    def result(self, planned: PlannedSweep) -> RunResult | None:
        """What there is of a sweep so far."""
        run_dir = self.run_dir(planned)
        return read_log(run_dir).result if run_dir.events.exists() else None


@dataclass(frozen=True)
class TeacherAccuracy:
    """The accuracy of the students' teacher, and its weights."""

    top1_pct: float
    weights: str


@dataclass(frozen=True)
class Cell:
    """A published number, and our accuracy."""

    pair: str
    column: str
    verdict: Verdict
    failed: str = ""
    """Why a seed has no accuracy."""


def check_begun(job: Reproduction) -> None:
    """Refuse a folder of other runs, whose accuracies would be taken for these. Raises ExperimentError."""
    for planned in job.sweeps:
        if has_begun(path := job.run_dir(planned).root):
            check_same("sweep", planned.resolved, path)


def prepare(job: Reproduction) -> DataIdentity | None:
    """Refuse what cannot be run, before the first sweep starts. Returns what the data of all is. Raises DistillError."""
    data = None
    for planned in job.sweeps:
        resolved, data = check_sweep(planned.resolved)
        run_dir = job.run_dir(planned)
        if (result := job.result(planned)) is not None:
            check_checkpoints(run_dir, result)
            check_data_of_run(str(run_dir.root), resolved.experiment, result, data, accept_new=False)
    return data


def size_differences(job: Reproduction) -> list[str]:
    """How the data differs from the table's. Raises DataError where it cannot be opened."""
    data = job.sweeps[0].resolved.experiment.data
    train, val = (open_source(data, split) for split in ("train", "val"))
    sizes = {"train_images": len(train), "val_images": len(val), "num_classes": len(train.classes)}
    return [f"{key} {sizes[key]} for {number}" for key, number in job.table.data.model_dump().items() if sizes[key] != number]


def run_sweeps(job: Reproduction, data: DataIdentity | None, log: Callable[[str], None]) -> list[str]:
    """Run the sweeps that are not complete, on `data`. Returns one line for each that failed; the others are run all the same.

    Raises:
        DistillError: another process runs a sweep.
        KeyboardInterrupt: everything is saved; the same call continues.
    """
    failed = []
    for planned in job.sweeps:
        run_dir = job.run_dir(planned)
        if not has_begun(run_dir.root):
            create_private(job.root)
            begin_run(planned.resolved, "sweep", run_dir, job.root)
        _, _, result = reopen(run_dir.root, to_continue=True)
        if result.status == "complete":
            log(f"{planned.name}: complete")
            continue
        try:
            sweep(planned.resolved, run_dir, end_of_run, data)
        except TrainingError as error:
            failed.append(f"{planned.name}: {error}")
    return failed


def cells(job: Reproduction) -> list[Cell]:
    """Every requested published number with what there is of it so far."""
    rows = {planned.name: result.rows if (result := job.result(planned)) else [] for planned in job.sweeps}
    return [_cell(job, pair, column, rows) for pair, column in job.request.cells(job.table)]


def _cell(job: Reproduction, pair: str, column: str, rows: Mapping[str, Sequence[TrialRow]]) -> Cell:
    """`rows`: of each sweep the trials so far."""
    table, student, teacher = job.table, job.table.pairs[pair].student, job.table.pairs[pair].teacher
    planned = next(p for p in job.sweeps if (student, column) in p.rows and p.teacher in (None, teacher))
    trials = [row for row in rows[planned.name] if int(row.id) in planned.rows[student, column]]
    metric = "top1_pct" if table.source_of(column).epoch == "last" else "best_top1_pct"
    published = table.published(pair, column)
    assert published is not None
    verdict = compare_accuracy(
        published,
        [trial.metrics[metric] for trial in trials if trial.status == "ok"],
        num_published=table.num_runs(pair, column),
        min_tolerance=table.tolerance_pct,
        num_seeds=len(job.request.seeds),
        comparable=not job.changed,
    )
    reasons = [trial.reason for trial in trials if trial.status in ("failed", "oom", "infeasible")]
    return Cell(pair, column, verdict, reasons[0] if reasons else "")


def teachers_of(job: Reproduction) -> dict[str, TeacherAccuracy | None]:
    """The accuracy of each teacher as far as it is known: the first trial measures one whose weights were given."""
    found: dict[str, TeacherAccuracy | None] = {}
    for planned in job.sweeps:
        teacher, result = planned.resolved.experiment.teacher, job.result(planned)
        if planned.teacher is None or teacher is None:
            continue
        stages, rows = (result.stages, result.rows) if result is not None else ([], [])
        trained = ((row.metrics.get("best_top1_pct"), str(row.checkpoint)) for row in stages if row.stage == "teacher")
        given = ((row.metrics.get("teacher_top1_pct"), str(teacher.weights)) for row in rows)
        known = (TeacherAccuracy(pct, weights) for pct, weights in (*trained, *given) if pct is not None)
        found[planned.teacher] = next(known, None)
    return found


def write_table_result(job: Reproduction, name: str) -> Path:
    """`reproduce.json`: every cell and teacher, with what was changed."""
    path, table, found = job.out / "reproduce.json", job.table, teachers_of(job)
    result = {
        "table": name,
        "title": table.title,
        "seeds": list(job.request.seeds),
        "changed": list(job.changed),
        "tolerance_pct": table.tolerance_pct,
        "sources": {key: source.model_dump() for key, source in table.sources.items()},
        "teachers": {
            key: {"published_pct": table.teachers.models[key].top1_pct, **(asdict(ours) if ours else {})}
            for key, ours in found.items()
        },
        "cells": [asdict(cell) for cell in cells(job)],
    }
    write_json(path, result)
    return path
