"""The plan and the comparison as tables for the terminal."""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise

from service.report.labels import number
from service.report.table import Table as Grid
from service.reproduce.run_table import Cell, Reproduction, TeacherAccuracy
from service.reproduce.table import ALONE, Table
from service.reproduce.verdict import MeanAccuracy

COLORS = {"pass": "green", "fail": "red"}


def plan_grid(job: Reproduction) -> Grid:
    """One row per sweep."""
    left = ("sweep", "teacher", "students", "methods", "seeds")
    rows = []
    seeds = ", ".join(map(str, job.request.seeds))
    for planned in job.sweeps:
        weights = planned.resolved.experiment.teacher.weights if planned.resolved.experiment.teacher else None
        teacher = "–" if planned.teacher is None else f"{planned.teacher}: {weights or 'trained first'}"
        students = ", ".join(dict.fromkeys(student for student, _ in planned.rows))
        columns = ", ".join(dict.fromkeys(column for _, column in planned.rows))
        rows.append([planned.name, teacher, students, columns, seeds, str(planned.num_runs), f"{planned.num_epochs:,}"])
    return Grid(job.table.title, [*left, "runs", "epochs"], rows, left=left, optional=("epochs", "seeds"))


def plan_line(job: Reproduction) -> str:
    """How many runs and epochs."""
    runs, epochs = sum(planned.num_runs for planned in job.sweeps), sum(planned.num_epochs for planned in job.sweeps)
    return f"{runs} runs, {epochs:,} epochs of {job.table.data.train_images:,} images"


def cells_grid(table: Table, found: Sequence[Cell], changed: Sequence[str]) -> Grid:
    """One row per published number; what was not run has a dash."""
    columns = ["pair", "method", "published", "of epoch", "last", "best", "runs", "difference", "tolerance", "verdict"]
    title = f"{table.title}: top-1 %, ours and the published"
    pairs = [None, *(cell.pair for cell in found)]
    return Grid(
        title,
        columns,
        [
            [cell.pair if cell.pair != previous else "", *_cell_columns(cell)]
            for previous, cell in zip(pairs, found, strict=False)
        ],
        f"changed, so that nothing is comparable: {', '.join(changed)}" if changed else "",
        left=("pair", "method", "of epoch", "verdict"),
        optional=("of epoch", "best", "tolerance"),
        sections=[number for number, (one, next_one) in enumerate(pairwise(pairs[1:])) if one != next_one],
        styles={number: COLORS.get(cell.verdict.outcome, "") for number, cell in enumerate(found)},
    )


def _cell_columns(cell: Cell) -> list[str]:
    verdict = cell.verdict
    outcome = "reduced: not comparable" if verdict.outcome == "not comparable" else verdict.outcome
    return [
        "labels alone" if cell.column == ALONE else cell.column,
        number(verdict.published),
        verdict.epoch,
        _mean(verdict.last),
        _mean(verdict.best),
        str(verdict.last.num) if verdict.last else "-",
        f"{verdict.difference:+.2f}" if verdict.difference is not None else "-",
        number(verdict.tolerance) if verdict.tolerance is not None else "-",
        outcome + (f": {cell.failed}" if cell.failed else ""),
    ]


def _mean(mean: MeanAccuracy | None) -> str:
    if mean is None:
        return "-"
    return number(mean.value) + (f" ± {mean.std:.2f}" if mean.std is not None else "")


def teachers_grid(table: Table, teachers: Mapping[str, TeacherAccuracy | None]) -> Grid:
    """One row per teacher."""
    rows = []
    for name, accuracy in teachers.items():
        published = number(table.teachers.models[name].top1_pct)
        ours = (number(accuracy.top1_pct), accuracy.weights) if accuracy else ("-", "-")
        rows.append([name, published, *ours])
    return Grid("teachers", ["teacher", "published", "ours", "weights"], rows, left=("teacher", "weights"))


def verdict_counts(found: Sequence[Cell]) -> str:
    counts = Counter(cell.verdict.outcome for cell in found)
    names = {"-": "not run"}
    return f"{len(found)} published numbers: " + ", ".join(f"{count} {names.get(name, name)}" for name, count in counts.items())
