"""The plan and the comparison as tables for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table as Grid

from service.report.labels import number
from service.reproduce.run_table import Cell, Reproduction
from service.reproduce.table import ALONE, Table
from service.reproduce.teacher_accuracy import Known
from service.reproduce.verdict import Mean


def plan_grid(job: Reproduction) -> Grid:
    """One row a sweep."""
    grid = Grid(title=job.table.title, title_justify="left")
    for name in ("sweep", "teacher", "students", "methods", "seeds", "runs", "epochs"):
        grid.add_column(name, justify="right" if name in ("runs", "epochs") else "left", overflow="fold")
    for part in job.parts:
        weights = part.resolved.experiment.teacher.weights if part.resolved.experiment.teacher else None
        teacher = "–" if part.teacher is None else f"{part.teacher}: {weights or 'trained first'}"
        students, columns = (", ".join(dict.fromkeys(row[place] for row in part.rows)) for place in (0, 1))
        seeds = ", ".join(map(str, job.request.seeds))
        grid.add_row(part.name, teacher, students, columns, seeds, str(part.num_runs), f"{part.num_epochs:,}")
    return grid


def plan_line(job: Reproduction, seconds: float | None) -> str:
    """The sum of it."""
    runs, epochs = sum(part.num_runs for part in job.parts), sum(part.num_epochs for part in job.parts)
    hours = (
        f"{seconds / 3600:,.1f} hours left, one run after the other"
        if seconds is not None
        else ("hours: not known before a run has ended; --images-per-s gives them for a speed")
    )
    return f"{runs} runs, {epochs:,} epochs of {job.table.data.train_images:,} images; {hours}"


def cells_grid(table: Table, found: Sequence[Cell], changed: Sequence[str]) -> Grid:
    """One row a published number; what was not run has a dash."""
    grid = Grid(title=f"{table.title}: top-1 %, ours beside the published", title_justify="left")
    for name in ("pair", "method", "published", "of epoch", "last", "best", "runs", "difference", "tolerance", "verdict"):
        grid.add_column(name, justify="left" if name in ("pair", "method", "of epoch", "verdict") else "right")
    before = None
    for cell in found:
        if before not in (None, cell.pair):
            grid.add_section()
        verdict = cell.verdict
        ours = verdict.last
        said = "reduced: not comparable" if verdict.outcome == "not comparable" else verdict.outcome
        grid.add_row(
            cell.pair if cell.pair != before else "",
            "labels alone" if cell.column == ALONE else cell.column,
            number(verdict.published),
            verdict.epoch,
            _mean(verdict.last),
            _mean(verdict.best),
            str(ours.num) if ours else "-",
            f"{verdict.difference:+.2f}" if verdict.difference is not None else "-",
            number(verdict.tolerance) if verdict.tolerance is not None else "-",
            said + (f": {cell.failed}" if cell.failed else ""),
            style={"pass": "green", "fail": "red"}.get(verdict.outcome),
        )
        before = cell.pair
    if changed:
        grid.caption = f"changed, so that nothing is comparable: {', '.join(changed)}"
    return grid


def _mean(mean: Mean | None) -> str:
    if mean is None:
        return "-"
    return number(mean.value) + (f" ± {mean.std:.2f}" if mean.std is not None else "")


def teachers_grid(table: Table, known: Mapping[str, Known | None]) -> Grid:
    """One row a teacher, with the first twelve digits of its weights' SHA-256."""
    grid = Grid(title="teachers", title_justify="left")
    for name in ("teacher", "published", "ours", "sha256", "weights"):
        grid.add_column(name, justify="right" if name in ("published", "ours") else "left", overflow="fold")
    for name, one in known.items():
        published = number(table.teachers.models[name].top1_pct)
        ours = (number(one.top1_pct), one.sha256[:12], one.weights) if one else ("-", "-", "-")
        grid.add_row(name, published, *ours)
    return grid


def summary(found: Sequence[Cell]) -> str:
    """How many of each verdict."""
    counts: dict[str, int] = {}
    for cell in found:
        counts[cell.verdict.outcome] = counts.get(cell.verdict.outcome, 0) + 1
    names = {"-": "not run"}
    return f"{len(found)} published numbers: " + ", ".join(f"{count} {names.get(name, name)}" for name, count in counts.items())
