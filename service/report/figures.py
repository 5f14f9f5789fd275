"""A sweep's figures, as pure functions of its rows: phases, waits, scaling, speed against cost."""

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from service.config.space import GLOBAL_BATCH, NUM_WORKERS
from service.report import labels as names
from service.report import plotly_marks as marks
from service.report.plotly_marks import Figure, Trace
from service.report.run_records import Row, axes, gpu_s_per_epoch, ran, value
from service.report.speed_by_axis import NAMED, spans, tip
from service.search.planner import front as front_of
from trainables.metrics.phases import ALL_PHASES

PHASE_COLOURS = {
    "data": marks.VERMILION,
    "h2d": "#F0E442",
    "augment": marks.SKY,
    "teacher": marks.BLUE,
    "student": marks.GREEN,
    "backward": marks.PURPLE,
    "optimizer": marks.ORANGE,
    "receive": "#000000",
    "bubble": marks.GREY,
}


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
    longest_ms = max(float(row.metrics["phase/data_max_ms"]) for row in shown)
    names_ms = [f"phase/data{part}_ms" for part in ("", "_min", "_p95", "_max")]
    table = [
        [
            row.id,
            names.point(row, unit, keys),
            *(names.number(row.metrics.get(name)) for name in names_ms),
            names.number(row.metrics.get("data_pct"), 1),
        ]
        for row in shown
    ]
    return Figure(
        "waits",
        "The wait for data, least to most",
        f"Milliseconds that a step waits for images: a long bar is a loader that stalls now and then. "
        f"The longest wait was {names.short(longest_ms)} ms." + names.left_out(rows, {row.id for row in shown}, "waits"),
        wait_marks(shown, labels, unit, keys),
        {"xaxis": axis, "yaxis": marks.y_axis("ms")},
        ["trial", "point", "mean ms", "least", "p95", "most", "% of a step"],
        table,
    )


def wait_marks(shown: Sequence[Row], labels: Sequence[Any], unit: str, keys: Sequence[str]) -> list[Trace]:
    """Each trial's mean wait with a bar from the least to the most, and the 95% quantile."""
    few = len(shown) <= NAMED
    mean_ms, least_ms, most_ms = ([row.metrics[f"phase/data{part}_ms"] for row in shown] for part in ("", "_min", "_max"))
    p95_ms = [row.metrics.get("phase/data_p95_ms") for row in shown]
    tips = [
        tip(row, unit, keys, f"waits {names.short(mean)} ms a step, {names.short(least)} to {names.short(most)}")
        for row, mean, least, most in zip(shown, mean_ms, least_ms, most_ms, strict=True)
    ]
    whole = marks.dots("mean, with the least and the most", 0, labels, mean_ms, tips)
    whole["marker"]["size"] = 9 if few else 4
    above = [max(0.0, most - mean) for mean, most in zip(mean_ms, most_ms, strict=True)]
    below = [max(0.0, mean - least) for mean, least in zip(mean_ms, least_ms, strict=True)]
    whole["error_y"] = marks.whiskers(marks.GREY, above, below) | {"width": 3 if few else 0}
    p95_tips = [marks.hover(f"95%: {names.number(ms)} ms") for ms in p95_ms]
    p95 = marks.dots("95% of steps wait less", 1, labels, p95_ms, p95_tips)
    p95["marker"] = {"color": marks.VERMILION, "symbol": "line-ew-open", "size": 12 if few else 5}
    return [whole, p95]


def by_speed(rows: Sequence[Row], metric: str) -> tuple[list[Row], list[Any], dict[str, Any]]:
    """The trials that have a metric, the fastest first; their labels along a figure's axis, ids where they are few; that axis."""
    shown = sorted((row for row in ran(rows) if metric in row.metrics), key=lambda row: -row.metrics["images_per_s"])
    if len(shown) > NAMED:
        return shown, list(range(1, len(shown) + 1)), {"title": {"text": "rank by speed"}}
    axis = {"title": {"text": "trial, fastest first"}, "type": "category", "showgrid": False}
    return shown, [marks.unformatted(row.id) for row in shown], axis


def efficiency(rows: Sequence[Row], best: Row, unit: str) -> Figure | None:
    """Speed a worker as a share of that of the fewest workers: 100% is ideal scaling."""
    measured = ran(rows)
    batch, workers = value(best, GLOBAL_BATCH), value(best, NUM_WORKERS)
    groups = {
        f"the best at each number of {unit}s": measured,
        f"at global batch {batch}": [row for row in measured if value(row, GLOBAL_BATCH) == batch],
        f"at batch {names.short(batch / workers)} a {unit}": [
            row for row in measured if value(row, GLOBAL_BATCH) * workers == batch * value(row, NUM_WORKERS)
        ],
    }
    traces, table, counts, summary = [], [], set(), ""
    for index, (name, group) in enumerate(groups.items()):
        fastest = fastest_by_workers(group)
        if len(fastest) < 2:
            continue
        xs, each = list(fastest), [row.metrics["images_per_s"] / count for count, row in fastest.items()]
        share = [100 * one / each[0] for one in each]
        counts |= set(xs)
        tips = [tip(row, unit, axes(rows), f"{pct:.0f}% of ideal") for row, pct in zip(fastest.values(), share, strict=True)]
        traces.append(marks.joined_dots(name, index, xs, share, tips))
        table += [
            [name, str(count), row.id, names.number(row.metrics["images_per_s"], 1), f"{pct:.0f}%"]
            for (count, row), pct in zip(fastest.items(), share, strict=True)
        ]
        summary = summary or f"{names.counted(xs[-1], unit)} reach {share[-1]:.0f}% of ideal."
    if not traces:
        return None
    ideal = marks.line("ideal", 0, [min(counts), max(counts)], [100, 100], hoverinfo="skip")
    ideal["line"] = {"color": marks.GREY, "dash": "dot", "width": 2}
    return Figure(
        "efficiency",
        "Scaling against ideal",
        f"Images/s of each {unit}, as a share of what it is with the fewest {unit}s. {summary}",
        [ideal, *traces],
        {"xaxis": marks.numbers_axis(f"{unit}s", sorted(counts), spans(counts)), "yaxis": marks.y_axis("% of ideal")},
        ["series", f"{unit}s", "trial", "images/s", "of ideal"],
        table,
    )


def fastest_by_workers(rows: Sequence[Row]) -> dict[int, Row]:
    """The fastest trial with each number of workers, fewest first."""
    slowest_first = sorted(rows, key=lambda row: (value(row, NUM_WORKERS), row.metrics["images_per_s"]))
    return {value(row, NUM_WORKERS): row for row in slowest_first}


def pareto_rows(rows: Sequence[Row]) -> list[Row]:
    """The trials that none other beats in both speed and cost, the cheapest first."""
    costed = [row for row in ran(rows) if gpu_s_per_epoch(row) is not None]
    workers_O = np.array([row.scale.num_workers for row in costed], dtype=float)
    time_O = -np.log([row.metrics["images_per_s"] for row in costed])
    return sorted((costed[index] for index in front_of(workers_O, time_O)), key=cost)


def pareto(rows: Sequence[Row], unit: str, found: Collection[str] = ()) -> Figure | None:
    """Speed against what an epoch costs. `found`: the trials on the front by the search's model where there was one."""
    keys = axes(rows)
    costed = [row for row in ran(rows) if gpu_s_per_epoch(row) is not None]
    if len(costed) < 2:
        return None
    front = sorted((row for row in costed if row.id in found), key=cost) or pareto_rows(rows)
    on_front = {row.id for row in front}
    name = "the search's front" if found else "nothing is faster and cheaper"
    stairs = marks.line(name, 0, [cost(row) for row in front], [row.metrics["images_per_s"] for row in front], hoverinfo="skip")
    stairs["line"] = {"color": marks.GREY, "shape": "hv", "dash": "dot", "width": 2}
    traces: list[Trace] = [stairs]
    counts = sorted({value(row, NUM_WORKERS) for row in costed})
    for index, count in enumerate(counts if len(counts) <= marks.MOST_SERIES else [None]):
        part = [row for row in costed if count is None or value(row, NUM_WORKERS) == count]
        points = marks.dots(
            names.counted(count, unit) if count else "trials",
            index,
            [cost(row) for row in part],
            [row.metrics["images_per_s"] for row in part],
            [tip(row, unit, keys, f"{names.short(cost(row))} {unit}-s an epoch") for row in part],
        )
        on = [row.id in on_front for row in part]
        points["marker"] |= {"size": [12 if one else 7 for one in on], "opacity": [1.0 if one else 0.5 for one in on]}
        traces.append(points)
    summary = "; ".join(names.point(row, unit, keys) for row in front[:4]) + (" …" if len(front) > 4 else "")
    speeds = [(row, (row.metrics["images_per_s"], 1), (cost(row), 2), (row.metrics["epoch_s"], 2)) for row in front]
    return Figure(
        "pareto",
        "Speed against cost",
        f"Up is faster, left is cheaper. On the front: {summary}." + names.left_out(rows, {row.id for row in costed}, "a cost"),
        traces,
        {"xaxis": {"title": {"text": f"{unit}-seconds an epoch"}}, "yaxis": marks.y_axis("images/s", zero=False)},
        ["trial", "point", "images/s", f"{unit}-s an epoch", "s an epoch"],
        [[row.id, names.point(row, unit, keys), *(names.number(*one) for one in numbers)] for row, *numbers in speeds],
    )


def cost(row: Row) -> float:
    """See `gpu_s_per_epoch`; of a trial that has one."""
    return gpu_s_per_epoch(row) or 0.0
