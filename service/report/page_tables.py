"""The tables of a sweep's page: images/s as a whole, every trial, trials without a result; and the experiment's values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from service.config.space import GLOBAL_BATCH, LOADER_WORKERS, NUM_WORKERS, SCALE_AXES
from service.report import labels as names
from service.report import speed_by_axis as along
from service.report.document import PageSection, PageTable, Shade
from service.report.run_records import Records, Row, axes, ended, gpu_s_per_epoch, ordered, ran, value

BAD = ("failed", "oom", "infeasible", "stopped")
NEAR_ACROSS, NEAR_DOWN = 7, 7  # columns and rows that are seen at a glance, the best trial among them
MOST_ACROSS, MOST_DOWN = 24, 60  # of a table that is looked at as a whole
MOST_OPEN = 12  # rows of a table that is not folded


Cell = tuple[tuple[Any, ...], Any]
"""Where a trial stands in a grid: the row's values, the column's value."""


@dataclass(frozen=True)
class Grid:
    """A trial of each combination of a sweep's three axes, with two of them (`down_keys`) down and one (`across_key`) across."""

    down_keys: Sequence[str]
    across_key: str
    down: Sequence[tuple[Any, ...]]
    across: Sequence[Any]
    cells: Mapping[Cell, Row]
    best: Cell | None

    def around_best(self) -> Grid:
        """The rows and columns that are nearest to the best trial's, counted in steps of each axis."""
        assert self.best is not None
        positions = positions_of(self.down)
        best_row, best_column = positions[self.best[0]], self.across.index(self.best[1])
        nearest = sorted(self.down, key=lambda row: sum(abs(a - b) for a, b in zip(positions[row], best_row, strict=True)))
        first = min(max(0, best_column - NEAR_ACROSS // 2), max(0, len(self.across) - NEAR_ACROSS))
        rows = [row for row in self.down if row in nearest[:NEAR_DOWN]]
        return replace(self, down=rows, across=self.across[first : first + NEAR_ACROSS])


def positions_of(rows: Iterable[tuple[Any, ...]]) -> dict[tuple[Any, ...], tuple[int, ...]]:
    """Each row's position along each of its axes."""
    rows = list(rows)
    axes_values = [ordered(values) for values in zip(*rows, strict=True)]
    return {row: tuple(values.index(part) for values, part in zip(axes_values, row, strict=True)) for row in rows}


def grid(records: Records) -> Grid | None:
    """Workers and batch (down) × loader workers (across); where all trials have as many of these, workers × batch.

    A combination with several trials has the best one of the sweep, or else the fastest, or else the first that ended.
    None where fewer than two combinations have a trial that ended, or none has a speed.
    """
    keys = axes(records.rows)
    across_key = LOADER_WORKERS if LOADER_WORKERS in keys else GLOBAL_BATCH
    down_keys = [key for key in (NUM_WORKERS, GLOBAL_BATCH) if key != across_key]

    def cell_of(row: Row) -> Cell:
        return tuple(hashable(value(row, key)) for key in down_keys), hashable(value(row, across_key))

    best = records.best
    tried = [*([best] if best else []), *sorted(ran(records.rows), key=speed, reverse=True), *ended(records.rows)]
    cells: dict[Cell, Row] = {}
    for row in tried:
        cells.setdefault(cell_of(row), row)
    if len(cells) < 2 or not ran(records.rows):
        return None
    positions = positions_of({down for down, _ in cells})
    down, across = sorted(positions, key=positions.__getitem__), ordered(column for _, column in cells)
    return Grid(down_keys, across_key, down, across, cells, cell_of(best) if best else None)


def heat(records: Records) -> list[PageTable]:
    """Images/s of the grid: around the best trial where the whole is large, and the whole."""
    whole = grid(records)
    if whole is None:
        return []
    title = f"Images/s by {listed([names.axis(key, records.unit) for key in (*whole.down_keys, whole.across_key)])}"
    if whole.best is None or (len(whole.down) <= NEAR_DOWN and len(whole.across) <= NEAR_ACROSS):
        return [heat_table(records, whole, title)]
    part = whole.around_best()
    near = heat_table(records, part, f"Around the best: {title}")
    if len(whole.across) <= MOST_ACROSS and len(whole.down) <= MOST_DOWN:
        return [near, heat_table(records, whole, f"All {len(whole.down)} rows: {title}", folded=True)]
    missing = {"more row": len(whole.down) - len(part.down), "more column": len(whole.across) - len(part.across)}
    counts = listed([names.counted(count, unit) for unit, count in missing.items() if count])
    return [replace(near, caption=f"{near.caption} {counts} are in the list of all trials below.")]


def heat_table(records: Records, shown: Grid, title: str, folded: bool = False) -> PageTable:
    """A grid as a table: speeds on a ground that is the stronger the faster, and how other trials ended."""
    fastest = max(map(speed, ran(records.rows)))
    rows: list[list[str | Shade]] = []
    for row in shown.down:
        parts = [names.at(key, part, records.unit) for key, part in zip(shown.down_keys, row, strict=True)]
        cells: list[str | Shade] = [" × ".join(parts)]
        for column in shown.across:
            found = shown.cells.get((row, column))
            if found is None:
                cells.append("–")
                continue
            text = names.number(speed(found), 1) if speed(found) else found.status
            share = (speed(found) / fastest) ** 2
            if (row, column) == shown.best:
                cells.append(Shade(f"{text} ★", share, "best"))
            else:
                cells.append(Shade(text, share, "" if share else "bad"))
        rows.append(cells)
    extras = [key for key in axes(records.rows) if key not in SCALE_AXES]
    caption = "Images/s; the stronger the ground, the faster; ★ is the best trial."
    if any("–" in row for row in rows):
        to_come = any(row.status == "pending" for row in records.rows)
        caption += " – has no result so far." if to_come else " – was not tried."
    caption += f" The fastest over {', '.join(extras)}." if extras else ""
    columns = ["", *(names.at(shown.across_key, column, records.unit) for column in shown.across)]
    return PageTable(title, columns, rows, caption, folded=folded, heads=True)


def hashable(found: Any) -> int | str:
    """A value of an axis, or its text where no experiment takes it: the point of an infeasible trial may hold a list."""
    return found if isinstance(found, int) else str(found)


def speed(row: Row) -> float:
    """Images/s; 0 where a trial has none."""
    return float(row.metrics.get("images_per_s") or 0.0)


def listed(words: Sequence[str]) -> str:
    """a, b and c."""
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def trials(records: Records) -> PageTable | None:
    """Every trial that was tried: GPUs × batch × loader workers → seconds a step, of it waiting for data, speed, epoch."""
    tried = [row for row in records.rows if row.status != "untested"]
    if not tried:
        return None
    extras = [key for key in axes(records.rows) if key not in SCALE_AXES]
    columns = ["trial", "status", f"{records.unit}s", "batch", "loader workers", *extras, "s/step", "of it data", "least–most"]
    columns += ["data %", "images/s", "±", "s/epoch", f"{records.unit}-s/epoch", "top-1 %", "took s"]
    rows, best = [], records.best
    for row in tried:
        m = row.metrics
        waits_ms = (m.get(f"phase/data{part}_ms") for part in ("", "_min", "_max"))
        mean, least, most = (names.number(ms / 1e3 if ms is not None else None, 4) for ms in waits_ms)
        status = row.status + (" oversubscribed" if row.oversubscribed else "")
        status += f" measured {len(row.measurements)} times" if row.measurements else ""
        rows.append(
            [
                row.id,
                status,
                *(str(value(row, key)) for key in (*SCALE_AXES, *extras)),
                names.number(m.get("step_s"), 4),
                mean,
                f"{least}–{most}" if least != "–" else "–",
                names.number(m.get("data_pct"), 1),
                names.number(m.get("images_per_s"), 1),
                along.error_cell(row),
                names.epoch_seconds_text(m),
                names.number(gpu_s_per_epoch(row)),
                names.number(m.get("top1_pct")),
                names.number(row.seconds, 1),
            ]
        )
    empty = {index for index in range(len(columns)) if all(row[index] == "–" for row in rows)}
    marked = frozenset(index for index, row in enumerate(tried) if best and row.id == best.id)
    return PageTable(
        f"All {names.counted(len(tried), 'trial')}",
        [name for index, name in enumerate(columns) if index not in empty],
        [[cell for index, cell in enumerate(row) if index not in empty] for row in rows],
        marked=marked,
        folded=len(tried) > MOST_OPEN,
    )


def bad(records: Records) -> PageTable | None:
    """Failed, infeasible and stopped trials, with their reasons."""
    rows = [row for row in records.rows if row.status in BAD]
    keys = axes(records.rows)
    cells = [[row.id, row.status, row.reason or "–", names.point(row, records.unit, keys)] for row in rows]
    if not rows:
        return None
    title = f"{names.counted(len(rows), 'trial')} and their reasons"
    return PageTable(title, ["trial", "status", "reason", "point"], cells, folded=len(rows) > MOST_OPEN)


def settings(records: Records) -> PageSection:
    """The experiment, each value with where it comes from."""

    def source(key: str) -> str:
        parts = key.split(".")
        found = (records.sources.get(".".join(parts[:count])) for count in range(len(parts), 0, -1))
        return next((one for one in found if one), "default")

    rows = [[key, str(item), source(key)] for key, item in records.experiment.items()]
    table = PageTable(f"All {len(rows)} values", ["key", "value", "from"], rows, folded=True)
    return PageSection("The experiment", tables=[table])
