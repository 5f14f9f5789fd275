"""A sweep's figures, as pure functions of its rows: speed over each axis, phases, waits, scaling, speed against cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from service.report import names
from service.report.curve import can_follow, curve
from service.report.marks import (
    BLUE,
    GREEN,
    GREY,
    MOST_SERIES,
    ORANGE,
    PALETTE,
    PURPLE,
    SKY,
    VERMILION,
    Figure,
    Trace,
    band,
    dots,
    faint,
    hover,
    line,
    numbers_axis,
    plain,
    whiskers,
    y_axis,
)
from service.report.records import Row, axes, gpu_s_per_epoch, ran, value
from service.search.points import GLOBAL_BATCH, LOADER_WORKERS, NUM_WORKERS
from service.search.replay import point_of
from service.search.step_time import StepTime
from trainables.phases import PHASES

PHASE_COLOURS = dict(zip(PHASES, (VERMILION, "#F0E442", SKY, BLUE, GREEN, PURPLE, ORANGE), strict=True))
NAMED = 40  # trials that a figure still names one by one
CONTINUOUS = 12  # values of an axis above which points are not told apart by it: a distribution, not a list


def tip(row: Row, unit: str, keys: Sequence[str], *more: str) -> str:
    """A trial's tooltip."""
    m, error = row["metrics"], row.get("error")
    speed = names.number(m["images_per_s"], 1) + (f" ± {names.short(error * m['images_per_s'])}" if error else "")
    return hover(f"trial {row['id']}", names.point(row, unit, keys), f"{speed} images/s", *more)


def is_number(held: Any) -> bool:
    return isinstance(held, int | float) and not isinstance(held, bool)


def over_axis(rows: Sequence[Row], best: Row, key: str, model: StepTime | None, unit: str) -> Figure | None:
    """Speed over one axis: a series for each value of a second axis, all others as the winner has them.

    The rest is in the background. Where the model can be asked it draws the curve that the marks lie on, or do not.
    """
    keys, measured = axes(rows), ran(rows)
    held = {value(row, key) if is_number(value(row, key)) else str(value(row, key)) for row in measured}
    if len(held) < 2 or key not in keys:
        return None
    numeric = all(is_number(place) for place in held)
    second = companion(keys, key)
    distinct = [k for k in keys if k not in (key, second) and len({repr(value(row, k)) for row in rows}) <= CONTINUOUS]
    slice_ = [row for row in measured if all(value(row, k) == value(best, k) for k in distinct)]
    traces: list[Trace] = []
    inside = {row["id"] for row in slice_}
    rest = [row for row in measured if row["id"] not in inside]
    if rest:
        xs = [value(row, key) if numeric else plain(value(row, key)) for row in rest]
        traces.append(
            faint("other trials", xs, [row["metrics"]["images_per_s"] for row in rest], [tip(r, unit, keys) for r in rest])
        )
    follows = model is not None and can_follow(key) and numeric
    for place, chosen in series(slice_, measured, best, second):
        mine = [row for row in slice_ if second is None or value(row, second) == chosen]
        mine.sort(key=lambda row: (0, float(value(row, key)), "") if numeric else (1, 0.0, str(value(row, key))))
        name = names.at(second, chosen, unit) if second else "measured"
        colour, group = PALETTE[place % MOST_SERIES], f"s{place}"
        if follows and model is not None:
            base = {**point_of(best), **({second: chosen} if second else {})}
            predicted = curve(model, base, key, float(min(held)), float(max(held)))
            traces.append(band(colour, predicted.at, predicted.low, predicted.high, group))
            traces.append(line(name, place, predicted.at, predicted.images_per_s, legendgroup=group, showlegend=False,
                               hoverinfo="skip"))  # fmt: skip
        speeds = [row["metrics"]["images_per_s"] for row in mine]
        marks = dots(name, place, [value(row, key) if numeric else plain(value(row, key)) for row in mine], speeds,
                     [tip(row, unit, keys) for row in mine], legendgroup=group)  # fmt: skip
        marks["error_y"] = whiskers(colour, [(row.get("error") or 0.0) * row["metrics"]["images_per_s"] for row in mine])
        if numeric and not follows:
            marks |= {"mode": "lines+markers", "line": {"color": colour, "width": 1}}
        traces.append(marks)
    fixed = ", ".join(names.at(k, value(best, k), unit) for k in distinct)
    caption = "Marks are measured" + (", bars one standard error" if any(row.get("error") for row in slice_) else "")
    caption += ", lines are the step-time model with one standard deviation." if follows else "."
    caption += f" The series have {fixed}, as the best trial." if fixed else ""
    ticks = numbers_axis(names.axis(key, unit), [float(place) for place in held], log=spans(held)) if numeric else {
        "title": {"text": plain(names.axis(key, unit))}, "type": "category"}  # fmt: skip
    shown = sorted(measured, key=lambda row: -row["metrics"]["images_per_s"])[:NAMED]
    table = [
        [str(value(row, key)), *(str(value(row, k)) for k in keys if k != key),
         names.number(row["metrics"]["images_per_s"], 1), error_cell(row), row["id"]] for row in shown
    ]  # fmt: skip
    columns = [names.axis(key, unit), *(names.axis(k, unit) for k in keys if k != key), "images/s", "± images/s", "trial"]
    return Figure(
        f"speed-{keys.index(key)}", f"Speed over {names.axis(key, unit)}", caption, traces,
        {"xaxis": ticks, "yaxis": y_axis("images/s")}, columns, table,
    )  # fmt: skip


def companion(keys: Sequence[str], key: str) -> str | None:
    """The axis whose values are a figure's series: workers, or the batch where workers are the figure's own axis."""
    wanted = (GLOBAL_BATCH, LOADER_WORKERS) if key == NUM_WORKERS else (NUM_WORKERS, GLOBAL_BATCH, LOADER_WORKERS)
    return next((k for k in wanted if k in keys and k != key), None)


def series(slice_: Sequence[Row], measured: Sequence[Row], best: Row, second: str | None) -> list[tuple[int, Any]]:
    """The values of the second axis that have marks, those around the winner's where there are too many.

    Each with its place among all, so that a value has the same colour and shape in every figure.
    """
    if second is None:
        return [(0, None)]
    every = sorted({value(row, second) for row in measured})
    marked = {value(row, second) for row in slice_}
    found = [(place, held) for place, held in enumerate(every) if held in marked]
    centre = next((number for number, (_, held) in enumerate(found) if held == value(best, second)), 0)
    first = min(max(0, centre - MOST_SERIES // 2), max(0, len(found) - MOST_SERIES))
    return found[first : first + MOST_SERIES]


def spans(held: set[Any]) -> bool:
    """Whether positive values spread over more than a factor of four: a logarithmic axis then."""
    return bool(min(held) > 0 and max(held) >= 4 * min(held))


def error_cell(row: Row) -> str:
    """One standard error of a trial's speed."""
    error, speed = row.get("error"), row["metrics"].get("images_per_s")
    return names.short(error * speed) if error and speed else "–"


def phases(rows: Sequence[Row], unit: str) -> Figure | None:
    """Where each trial's time goes, per 1,000 images so that batches compare, the fastest first."""
    keys = axes(rows)
    shown = [row for row in ran(rows) if row["metrics"].get("phase/step_ms")]
    shown.sort(key=lambda row: -row["metrics"]["images_per_s"])
    if not shown:
        return None
    few = len(shown) <= NAMED
    labels = [plain(row["id"]) for row in shown] if few else list(range(1, len(shown) + 1))
    traces, table = [], []
    for phase in PHASES:
        part = [row["metrics"].get(f"phase/{phase}_ms", 0.0) for row in shown]
        if not any(part):
            continue
        heights = [ms / row["scale"][GLOBAL_BATCH] for ms, row in zip(part, shown, strict=True)]
        tips = [tip(row, unit, keys, f"{phase}: {names.short(ms)} ms a step, {ms / row['metrics']['phase/step_ms']:.0%}")
                for ms, row in zip(part, shown, strict=True)]  # fmt: skip
        traces.append({"type": "bar", "name": phase, "x": labels, "y": heights, "hovertext": tips, "hoverinfo": "text",
                       "marker": {"color": PHASE_COLOURS[phase], "line": {"width": 0}}})  # fmt: skip
    for row in shown:
        m = row["metrics"]
        table.append([row["id"], names.point(row, unit, keys), *(names.number(m.get(f"phase/{phase}_ms")) for phase in PHASES),
                      names.number(m["phase/step_ms"])])  # fmt: skip
    return Figure(
        "phases", "Where a step's time goes", "Seconds for 1,000 images, stacked by phase; lower is faster.", traces,
        {"xaxis": ranks(few), "yaxis": y_axis("s per 1,000 images"), "barmode": "stack", "bargap": 0.15 if few else 0,
         "legend": {"traceorder": "normal"}},
        ["trial", "point", *(f"{phase} ms" for phase in PHASES), "step ms"], table,
    )  # fmt: skip


def waits(rows: Sequence[Row], unit: str) -> Figure | None:
    """What steps of each trial wait for data: the mean, and the least and the most that any step waited."""
    keys = axes(rows)
    shown = [row for row in ran(rows) if "phase/data_max_ms" in row["metrics"]]
    if not shown:
        return None
    shown.sort(key=lambda row: -row["metrics"]["images_per_s"])
    few = len(shown) <= NAMED
    m = [row["metrics"] for row in shown]
    labels = [plain(row["id"]) for row in shown] if few else list(range(1, len(shown) + 1))
    tips = [tip(row, unit, keys, f"waits {names.short(one['phase/data_ms'])} ms a step, "
                f"{names.short(one['phase/data_min_ms'])} to {names.short(one['phase/data_max_ms'])}")
            for row, one in zip(shown, m, strict=True)]  # fmt: skip
    mean = [one["phase/data_ms"] for one in m]
    p95 = [one.get("phase/data_p95_ms") for one in m]
    whole = dots("mean, with the least and the most", 0, labels, mean, tips)
    whole["marker"]["size"] = 9 if few else 4
    whole["error_y"] = whiskers(
        GREY, [max(0.0, one["phase/data_max_ms"] - one["phase/data_ms"]) for one in m],
        [max(0.0, one["phase/data_ms"] - one["phase/data_min_ms"]) for one in m],
    ) | {"width": 3 if few else 0}  # fmt: skip
    upper = dots("95% of steps wait less", 1, labels, p95, [hover(f"95%: {names.number(held)} ms") for held in p95])
    upper["marker"] = {"color": VERMILION, "symbol": "line-ew-open", "size": 12 if few else 5}
    worst = max(m, key=lambda one: float(one["phase/data_max_ms"]))["phase/data_max_ms"]
    parts = ("", "_min", "_p95", "_max")
    table = [
        [row["id"], names.point(row, unit, keys), *(names.number(one.get(f"phase/data{part}_ms")) for part in parts),
         names.number(one.get("data_pct"), 1)] for row, one in zip(shown, m, strict=True)
    ]  # fmt: skip
    return Figure(
        "waits", "The wait for data, least to most",
        f"Milliseconds that a step waits for images: a long bar is a loader that stalls now and then. "
        f"The longest wait was {names.short(worst)} ms.",
        [whole, upper], {"xaxis": ranks(few), "yaxis": y_axis("ms")},
        ["trial", "point", "mean ms", "least", "p95", "most", "% of a step"], table,
    )  # fmt: skip


def ranks(few: bool) -> dict[str, Any]:
    """The horizontal axis of figures with a place for each trial: named where these are few."""
    title = {"title": {"text": "trial, fastest first" if few else "rank by speed"}}
    return title | {"type": "category", "showgrid": False} if few else title


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
    traces, table, counts, told = [], [], set(), ""
    for place, (name, group) in enumerate(groups.items()):
        top: dict[int, Row] = {}
        for row in group:
            count = value(row, NUM_WORKERS)
            if count not in top or row["metrics"]["images_per_s"] > top[count]["metrics"]["images_per_s"]:
                top[count] = row
        if len(top) < 2:
            continue
        ordered = [top[count] for count in sorted(top)]
        each = [row["metrics"]["images_per_s"] / value(row, NUM_WORKERS) for row in ordered]
        share = [100 * one / each[0] for one in each]
        xs = [value(row, NUM_WORKERS) for row in ordered]
        counts |= set(xs)
        tips = [tip(row, unit, axes(rows), f"{pct:.0f}% of ideal") for row, pct in zip(ordered, share, strict=True)]
        marks = dots(name, place, xs, share, tips)
        traces.append(marks | {"mode": "lines+markers", "line": line("", place, [], [])["line"]})
        table += [[name, str(x), row["id"], names.number(row["metrics"]["images_per_s"], 1), f"{pct:.0f}%"]
                  for x, row, pct in zip(xs, ordered, share, strict=True)]  # fmt: skip
        told = told or f"{names.counted(xs[-1], unit)} reach {share[-1]:.0f}% of ideal."
    if not traces:
        return None
    span = [min(counts), max(counts)]
    ideal = line("ideal", 0, span, [100, 100], hoverinfo="skip") | {"line": {"color": GREY, "dash": "dot", "width": 2}}
    return Figure(
        "efficiency", "Scaling against ideal",
        f"Images/s of each {unit}, as a share of what it is with the fewest {unit}s. {told}", [ideal, *traces],
        {"xaxis": numbers_axis(f"{unit}s", sorted(counts), spans(counts)), "yaxis": y_axis("% of ideal")},
        ["series", f"{unit}s", "trial", "images/s", "of ideal"], table,
    )  # fmt: skip


def front(rows: Sequence[Row]) -> list[Row]:
    """The trials that none other beats in both speed and cost, the cheapest first."""
    costed = [row for row in ran(rows) if gpu_s_per_epoch(row) is not None]
    costed.sort(key=lambda row: (gpu_s_per_epoch(row), -row["metrics"]["images_per_s"]))
    kept: list[Row] = []
    for row in costed:
        if not kept or row["metrics"]["images_per_s"] > kept[-1]["metrics"]["images_per_s"]:
            kept.append(row)
    return kept


def pareto(rows: Sequence[Row], unit: str) -> Figure | None:
    """Speed against what an epoch costs."""
    keys = axes(rows)
    costed = [row for row in ran(rows) if gpu_s_per_epoch(row) is not None]
    if len(costed) < 2:
        return None
    kept = front(rows)

    def cost(row: Row) -> float:
        return gpu_s_per_epoch(row) or 0.0

    stairs = line("nothing is faster and cheaper", 0, [cost(row) for row in kept], [r["metrics"]["images_per_s"] for r in kept],
                  hoverinfo="skip")  # fmt: skip
    stairs["line"] = {"color": GREY, "shape": "hv", "dash": "dot", "width": 2}
    traces: list[Trace] = [stairs]
    counts = sorted({value(row, NUM_WORKERS) for row in costed})
    for place, group in enumerate(counts if len(counts) <= MOST_SERIES else [None]):
        mine = [row for row in costed if group is None or value(row, NUM_WORKERS) == group]
        on = [row in kept for row in mine]
        marks = dots(names.counted(group, unit) if group else "trials", place, [cost(row) for row in mine],
                     [row["metrics"]["images_per_s"] for row in mine],
                     [tip(row, unit, keys, f"{names.short(cost(row))} {unit}-s an epoch") for row in mine])  # fmt: skip
        marks["marker"] |= {"size": [12 if one else 7 for one in on], "opacity": [1.0 if one else 0.5 for one in on]}
        traces.append(marks)
    told = "; ".join(names.point(row, unit, keys) for row in kept[:4]) + (" …" if len(kept) > 4 else "")
    return Figure(
        "pareto", "Speed against cost", f"Up is faster, left is cheaper. On the front: {told}.", traces,
        {"xaxis": {"title": {"text": f"{unit}-seconds an epoch"}}, "yaxis": y_axis("images/s", zero=False)},
        ["trial", "point", "images/s", f"{unit}-s an epoch", "s an epoch"],
        [[row["id"], names.point(row, unit, keys), names.number(row["metrics"]["images_per_s"], 1), names.number(cost(row), 1),
          names.number(row["metrics"]["epoch_s"])] for row in kept],
    )  # fmt: skip
