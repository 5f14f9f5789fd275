"""The plan and the comparison as tables for the terminal."""

from collections import Counter
from collections.abc import Mapping, Sequence

from service.report.labels import number
from service.report.table import Table as Grid
from service.reproduce.run_table import Cell, Reproduction, TeacherAccuracy
from service.reproduce.table import ALONE, Table

COLORS = {"pass": "green", "fail": "red"}


def plan_grid(job: Reproduction) -> Grid:
    """One row per sweep; below them, how many runs and epochs there are in all."""
    left, rows = ("sweep", "teacher", "students", "methods"), []
    for planned in job.sweeps:
        weights = planned.resolved.experiment.teacher.weights if planned.resolved.experiment.teacher else None
        teacher = "–" if planned.teacher is None else f"{planned.teacher}: {weights or 'trained first'}"
        students = ", ".join(dict.fromkeys(student for student, _ in planned.rows))
        columns = ", ".join(dict.fromkeys(column for _, column in planned.rows))
        rows.append([planned.name, teacher, students, columns, str(planned.num_runs), f"{planned.num_epochs:,}"])
    runs, epochs = sum(planned.num_runs for planned in job.sweeps), sum(planned.num_epochs for planned in job.sweeps)
    total = f"{runs} runs, {epochs:,} epochs of {job.table.data.train_images:,} images"
    return Grid(job.table.title, [*left, "runs", "epochs"], rows, total, left=left, optional=("epochs",))


def cells_grid(table: Table, found: Sequence[Cell], changed: Sequence[str]) -> Grid:
    """One row per published number, with ours of the same epoch; what was not run has a dash. Below them, their verdicts."""
    counts = Counter(cell.verdict.outcome.replace("-", "not run") for cell in found)
    summary = f"{len(found)} published numbers: " + ", ".join(f"{count} {name}" for name, count in counts.items())
    return Grid(
        f"{table.title}: top-1 %, ours and the published",
        ["pair", "method", "published", "ours", "runs", "difference", "tolerance", "verdict"],
        [_cell_columns(cell) for cell in found],
        summary + (f"; changed, so that nothing is comparable: {', '.join(changed)}" if changed else ""),
        left=("pair", "method", "verdict"),
        optional=("tolerance",),
        styles={number: COLORS.get(cell.verdict.outcome, "") for number, cell in enumerate(found)},
    )


def _cell_columns(cell: Cell) -> list[str]:
    verdict, ours = cell.verdict, cell.verdict.ours
    numbers = ["-"] * 4
    if ours is not None:
        deviation = f" ± {ours.std:.2f}" if ours.std is not None else ""
        numbers = [number(ours.value) + deviation, str(ours.num), f"{verdict.difference:+.2f}", number(verdict.tolerance)]
    outcome = "reduced: not comparable" if verdict.outcome == "not comparable" else verdict.outcome
    method = "labels alone" if cell.column == ALONE else cell.column
    return [cell.pair, method, number(verdict.published), *numbers, outcome + (f": {cell.failed}" if cell.failed else "")]


def teachers_grid(table: Table, teachers: Mapping[str, TeacherAccuracy | None]) -> Grid:
    """One row per teacher."""
    rows = []
    for name, ours in teachers.items():
        published, found = number(table.teachers.models[name].top1_pct), number(ours and ours.top1_pct)
        rows.append([name, published, found, ours.weights if ours else "–"])
    return Grid("teachers", ["teacher", "published", "ours", "weights"], rows, left=("teacher", "weights"))
