"""The tables of a sweep's page: images/s as a whole, every trial, trials without a result; and the experiment's values."""

from __future__ import annotations

from typing import Any

from service.report import along, names
from service.report.document import Section, Shade, Table
from service.report.records import Records, Row, axes, gpu_s_per_epoch, ordered, ran, value
from service.search.points import GLOBAL_BATCH, LOADER_WORKERS, NUM_WORKERS

BAD = ("failed", "oom", "infeasible", "stopped")
MOST_ACROSS, MOST_DOWN = 24, 60  # of a table that is looked at as a whole


def grid(records: Records) -> Table | None:
    """Images/s by workers and batch (down) and loader workers (across), the best over everything else.

    Where all trials have as many loader workers, by workers (down) and batch (across).
    """
    unit, keys = records.unit, axes(records.rows)
    across_key = LOADER_WORKERS if LOADER_WORKERS in keys else GLOBAL_BATCH
    down_keys = [key for key in (NUM_WORKERS, GLOBAL_BATCH) if key != across_key]
    top: dict[tuple[tuple[Any, ...], Any], Row] = {}
    for row in ran(records.rows):
        place = (tuple(value(row, key) for key in down_keys), value(row, across_key))
        if place not in top or row["metrics"]["images_per_s"] > top[place]["metrics"]["images_per_s"]:
            top[place] = row
    down, across = sorted({place[0] for place in top}), ordered(place[1] for place in top)
    if len(top) < 2 or len(across) > MOST_ACROSS or len(down) > MOST_DOWN:
        return None
    fastest = max(row["metrics"]["images_per_s"] for row in top.values())
    best = (records.best or {}).get("id")
    rows: list[list[str | Shade]] = []
    for held in down:
        cells: list[str | Shade] = [" × ".join(names.at(key, one, unit) for key, one in zip(down_keys, held, strict=True))]
        for column in across:
            if found := top.get((held, column)):
                speed = found["metrics"]["images_per_s"]
                mark = " ★" if found["id"] == best else ""
                cells.append(Shade(names.number(speed, 1) + mark, (speed / fastest) ** 2))
            else:
                cells.append("–")
        rows.append(cells)
    extras = [key for key in keys if key not in (NUM_WORKERS, GLOBAL_BATCH, LOADER_WORKERS)]
    caption = "Images/s; the stronger the ground, the faster; ★ is the best trial."
    caption += f" The best over {', '.join(extras)}." if extras else ""
    columns = ["", *(names.at(across_key, column, unit) for column in across)]
    return Table("images/s by workers, batch and loader workers", columns, rows, caption, heads=True)


def trials(records: Records) -> Table | None:
    """Every trial that was tried: GPUs × batch × loader workers → seconds a step, of it waiting for data, speed, epoch."""
    tried = [row for row in records.rows if row["status"] != "untested"]
    if not tried:
        return None
    extras = [key for key in axes(records.rows) if key not in (NUM_WORKERS, GLOBAL_BATCH, LOADER_WORKERS)]
    columns = ["trial", f"{records.unit}s", "batch", "loader workers", *extras, "s/step", "of it data", "least–most", "data %",
               "images/s", "±", "s/epoch", f"{records.unit}-s/epoch", "top-1 %", "took s", "status"]  # fmt: skip
    rows, best = [], records.best
    for row in tried:
        m = row["metrics"]
        data_s = [
            names.number(m[f"phase/data{part}_ms"] / 1e3, 4) if f"phase/data{part}_ms" in m else "–"
            for part in ("", "_min", "_max")
        ]
        epoch = names.number(m.get("epoch_s")) + ("*" if m.get("epoch_projected") else "")
        cost = gpu_s_per_epoch(row)
        status = row["status"] + (" oversubscribed" if row.get("oversubscribed") else "")
        rows.append([
            row["id"], *(str(value(row, key)) for key in (NUM_WORKERS, GLOBAL_BATCH, LOADER_WORKERS, *extras)),
            names.number(m.get("step_s"), 4), data_s[0], f"{data_s[1]}–{data_s[2]}" if data_s[1] != "–" else "–",
            names.number(m.get("data_pct"), 1), names.number(m.get("images_per_s"), 1), along.error_cell(row), epoch,
            names.number(cost, 1), names.number(m.get("top1_pct")), names.number(row.get("seconds"), 1), status,
        ])  # fmt: skip
    empty = {place for place in range(len(columns)) if all(row[place] == "–" for row in rows)}
    marked = frozenset(place for place, row in enumerate(tried) if best and row["id"] == best["id"])
    return Table(
        f"All {names.counted(len(tried), 'trial')}", [name for place, name in enumerate(columns) if place not in empty],
        [[cell for place, cell in enumerate(row) if place not in empty] for row in rows], marked=marked, folded=len(tried) > 12,
    )  # fmt: skip


def bad(records: Records) -> Table | None:
    """Failed, infeasible and stopped trials, with their reasons."""
    rows = [row for row in records.rows if row["status"] in BAD]
    keys = axes(records.rows)
    cells = [[row["id"], names.point(row, records.unit, keys), row["status"], row.get("reason") or "–"] for row in rows]
    return Table("Trials without a result", ["trial", "point", "status", "reason"], cells) if rows else None


def settings(records: Records) -> Section:
    """The experiment, each value with where it comes from."""

    def source(key: str) -> str:
        parts = key.split(".")
        found = (records.sources.get(".".join(parts[:count])) for count in range(len(parts), 0, -1))
        return next((one for one in found if one), "default")

    rows = [[key, str(held), source(key)] for key, held in records.experiment.items()]
    return Section("The experiment", tables=[Table(f"All {len(rows)} values", ["key", "value", "from"], rows, folded=True)])
