"""A sweep's figures, as pure functions of its rows: phases, waits, scaling, speed against cost."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from service.config.space import GLOBAL_BATCH, NUM_WORKERS
from service.report import labels as names
from service.report import plotly_marks as marks
from service.report.plotly_marks import Figure, Trace
from service.report.run_records import Row, axes, gpu_s_per_epoch, ran, value
from service.report.speed_by_axis import NAMED, spans, tip
from trainables.metrics.phases import ALL_PHASES

YELLOW = "#F0E442"
COLOURS = (marks.VERMILION, YELLOW, marks.SKY, marks.BLUE, marks.GREEN, marks.PURPLE, marks.ORANGE, marks.GREY)
PHASE_COLOURS = dict(zip(ALL_PHASES, COLOURS, strict=True))


def phases(rows: Sequence[Row], unit: str) -> Figure | None:
    """Where each trial's time goes, per 1,000 images so that batches compare, the fastest first."""
    keys = axes(rows)
    shown, labels, axis = by_speed(rows, "phase/step_ms")
    if not shown:
        return None
    few = len(shown) <= NAMED
    recorded = [phase for phase in ALL_PHASES if any(f"phase/{phase}_ms" in row.metrics for row in shown)]
    traces = []
    for phase in recorded:
        part = [row.metrics.get(f"phase/{phase}_ms", 0.0) for row in shown]
        if not any(part):
            continue
        heights = [ms / row.scale.global_batch_size for ms, row in zip(part, shown, strict=True)]
        tips = [
            tip(row, unit, keys, f"{phase}: {names.short(ms)} ms a step, {ms / row.metrics['phase/step_ms']:.0%}")
            for ms, row in zip(part, shown, strict=True)
        ]
        traces.append(marks.bars(phase, PHASE_COLOURS[phase], labels, heights, tips))
    table = [
        [
            row.id,
            names.point(row, unit, keys),
            *(names.number(row.metrics.get(f"phase/{phase}_ms")) for phase in (*recorded, "step")),
        ]
        for row in shown
    ]
    return Figure(
        "phases",
        "Where a step's time goes",
        "Seconds for 1,000 images, stacked by phase; lower is faster."
        + names.left_out(rows, {row.id for row in shown}, "phase times"),
        traces,
        {
            "xaxis": axis,
            "yaxis": marks.y_axis("s per 1,000 images"),
            "barmode": "stack",
            "bargap": 0.15 if few else 0,
            "legend": {"traceorder": "normal"},
        },
        ["trial", "point", *(f"{phase} ms" for phase in recorded), "step ms"],
        table,
    )


def waits(rows: Sequence[Row], unit: str) -> Figure | None:
    """What steps of each trial wait for data: the mean, and the least and the most that any step waited."""
    keys = axes(rows)
    shown, labels, axis = by_speed(rows, "phase/data_max_ms")
    if not shown:
        return None
    few = len(shown) <= NAMED
    m = [row.metrics for row in shown]
    tips = [
        tip(
            row,
            unit,
            keys,
            f"waits {names.short(one['phase/data_ms'])} ms a step, "
            f"{names.short(one['phase/data_min_ms'])} to {names.short(one['phase/data_max_ms'])}",
        )
        for row, one in zip(shown, m, strict=True)
    ]
    mean = [one["phase/data_ms"] for one in m]
    p95 = [one.get("phase/data_p95_ms") for one in m]
    whole = marks.dots("mean, with the least and the most", 0, labels, mean, tips)
    whole["marker"]["size"] = 9 if few else 4
    whole["error_y"] = marks.whiskers(
        marks.GREY,
        [max(0.0, one["phase/data_max_ms"] - one["phase/data_ms"]) for one in m],
        [max(0.0, one["phase/data_ms"] - one["phase/data_min_ms"]) for one in m],
    ) | {"width": 3 if few else 0}
    upper_tips = [marks.hover(f"95%: {names.number(value_ms)} ms") for value_ms in p95]
    upper = marks.dots("95% of steps wait less", 1, labels, p95, upper_tips)
    upper["marker"] = {"color": marks.VERMILION, "symbol": "line-ew-open", "size": 12 if few else 5}
    worst = max(m, key=lambda one: float(one["phase/data_max_ms"]))["phase/data_max_ms"]
    parts = ("", "_min", "_p95", "_max")
    table = [
        [
            row.id,
            names.point(row, unit, keys),
            *(names.number(one.get(f"phase/data{part}_ms")) for part in parts),
            names.number(one.get("data_pct"), 1),
        ]
        for row, one in zip(shown, m, strict=True)
    ]
    return Figure(
        "waits",
        "The wait for data, least to most",
        f"Milliseconds that a step waits for images: a long bar is a loader that stalls now and then. "
        f"The longest wait was {names.short(worst)} ms." + names.left_out(rows, {row.id for row in shown}, "waits"),
        [whole, upper],
        {"xaxis": axis, "yaxis": marks.y_axis("ms")},
        ["trial", "point", "mean ms", "least", "p95", "most", "% of a step"],
        table,
    )


def by_speed(rows: Sequence[Row], metric: str) -> tuple[list[Row], list[Any], dict[str, Any]]:
    """The trials that have a metric, the fastest first; their labels along a figure's axis, ids where they are few; that axis."""
    shown = sorted((row for row in ran(rows) if metric in row.metrics), key=lambda row: -row.metrics["images_per_s"])
    if len(shown) > NAMED:
        return shown, list(range(1, len(shown) + 1)), {"title": {"text": "rank by speed"}}
    axis = {"title": {"text": "trial, fastest first"}, "type": "category", "showgrid": False}
    return shown, [marks.unformatted(row.id) for row in shown], axis


def efficiency(rows: Sequence[Row], best: Row, unit: str) -> Figure | None:
    """Speed a worker beside that of the fewest workers: 100% is ideal scaling."""
    measured = ran(rows)
    batch, workers = value(best, GLOBAL_BATCH), value(best, NUM_WORKERS)
    groups = {
        f"the best at each number of {unit}s": measured,
        f"global batch {batch} kept": [row for row in measured if value(row, GLOBAL_BATCH) == batch],
        f"batch {names.short(batch / workers)} a {unit} kept": [
            row for row in measured if value(row, GLOBAL_BATCH) * workers == batch * value(row, NUM_WORKERS)
        ],
    }
    traces, table, counts, summary = [], [], set(), ""
    for index, (name, group) in enumerate(groups.items()):
        top: dict[int, Row] = {}
        for row in group:
            count = value(row, NUM_WORKERS)
            if count not in top or row.metrics["images_per_s"] > top[count].metrics["images_per_s"]:
                top[count] = row
        if len(top) < 2:
            continue
        ordered = [top[count] for count in sorted(top)]
        each = [row.metrics["images_per_s"] / value(row, NUM_WORKERS) for row in ordered]
        share = [100 * one / each[0] for one in each]
        xs = [value(row, NUM_WORKERS) for row in ordered]
        counts |= set(xs)
        tips = [tip(row, unit, axes(rows), f"{pct:.0f}% of ideal") for row, pct in zip(ordered, share, strict=True)]
        traces.append(marks.joined_dots(name, index, xs, share, tips))
        table += [
            [name, str(x), row.id, names.number(row.metrics["images_per_s"], 1), f"{pct:.0f}%"]
            for x, row, pct in zip(xs, ordered, share, strict=True)
        ]
        summary = summary or f"{names.counted(xs[-1], unit)} reach {share[-1]:.0f}% of ideal."
    if not traces:
        return None
    span = [min(counts), max(counts)]
    ideal = marks.line("ideal", 0, span, [100, 100], hoverinfo="skip") | {
        "line": {"color": marks.GREY, "dash": "dot", "width": 2}
    }
    return Figure(
        "efficiency",
        "Scaling against ideal",
        f"Images/s of each {unit}, as a share of what it is with the fewest {unit}s. {summary}",
        [ideal, *traces],
        {"xaxis": marks.numbers_axis(f"{unit}s", sorted(counts), spans(counts)), "yaxis": marks.y_axis("% of ideal")},
        ["series", f"{unit}s", "trial", "images/s", "of ideal"],
        table,
    )


def pareto_rows(rows: Sequence[Row]) -> list[Row]:
    """The trials that none other beats in both speed and cost, the cheapest first."""
    costed = [row for row in ran(rows) if gpu_s_per_epoch(row) is not None]
    costed.sort(key=lambda row: (gpu_s_per_epoch(row), -row.metrics["images_per_s"]))
    front_rows: list[Row] = []
    for row in costed:
        if not front_rows or row.metrics["images_per_s"] > front_rows[-1].metrics["images_per_s"]:
            front_rows.append(row)
    return front_rows


def pareto(rows: Sequence[Row], unit: str, found: Collection[str] = ()) -> Figure | None:
    """Speed against what an epoch costs. `found`: the trials on the front where a search has said so, in the light of all."""
    keys = axes(rows)
    costed = [row for row in ran(rows) if gpu_s_per_epoch(row) is not None]
    if len(costed) < 2:
        return None

    def cost(row: Row) -> float:
        return gpu_s_per_epoch(row) or 0.0

    front_rows = sorted((row for row in costed if row.id in found), key=cost) or pareto_rows(rows)

    name = "the search's front" if found else "nothing is faster and cheaper"
    stairs = marks.line(
        name, 0, [cost(row) for row in front_rows], [r.metrics["images_per_s"] for r in front_rows], hoverinfo="skip"
    )
    stairs["line"] = {"color": marks.GREY, "shape": "hv", "dash": "dot", "width": 2}
    traces: list[Trace] = [stairs]
    counts = sorted({value(row, NUM_WORKERS) for row in costed})
    for index, group in enumerate(counts if len(counts) <= marks.MOST_SERIES else [None]):
        group_rows = [row for row in costed if group is None or value(row, NUM_WORKERS) == group]
        on = [row in front_rows for row in group_rows]
        points = marks.dots(
            names.counted(group, unit) if group else "trials",
            index,
            [cost(row) for row in group_rows],
            [row.metrics["images_per_s"] for row in group_rows],
            [tip(row, unit, keys, f"{names.short(cost(row))} {unit}-s an epoch") for row in group_rows],
        )
        points["marker"] |= {"size": [12 if one else 7 for one in on], "opacity": [1.0 if one else 0.5 for one in on]}
        traces.append(points)
    summary = "; ".join(names.point(row, unit, keys) for row in front_rows[:4]) + (" …" if len(front_rows) > 4 else "")
    return Figure(
        "pareto",
        "Speed against cost",
        f"Up is faster, left is cheaper. On the front: {summary}." + names.left_out(rows, {row.id for row in costed}, "a cost"),
        traces,
        {"xaxis": {"title": {"text": f"{unit}-seconds an epoch"}}, "yaxis": marks.y_axis("images/s", zero=False)},
        ["trial", "point", "images/s", f"{unit}-s an epoch", "s an epoch"],
        [
            [
                row.id,
                names.point(row, unit, keys),
                names.number(row.metrics["images_per_s"], 1),
                names.number(cost(row)),
                names.number(row.metrics["epoch_s"]),
            ]
            for row in front_rows
        ],
    )
