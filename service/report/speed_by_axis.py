"""Speed over one axis of a sweep: measured marks, the step-time model's curve, everything else in the background."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from service.config.space import GLOBAL_BATCH, LOADER_WORKERS, NUM_WORKERS
from service.report import labels as names
from service.report.model_curve import can_follow, curve
from service.report.plotly_marks import (
    MOST_SERIES,
    PALETTE,
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
from service.report.run_records import Row, axes, ordered, ran, value
from service.search.rows import point_of
from service.search.step_time_model import StepTime

NAMED = 40  # trials that a figure still names one by one
CONTINUOUS = 12  # values of an axis above which points are not told apart by it: a distribution, not a list


def over_axis(rows: Sequence[Row], best: Row, key: str, model: StepTime | None, unit: str) -> Figure | None:
    """Speed over one axis: a series for each value of a second axis, all others as the winner has them.

    The rest is in the background. Where the model can be asked it draws the curve that the marks lie on, or do not.
    """
    keys, measured = axes(rows), ran(rows)
    axis_values = {value(row, key) if is_number(value(row, key)) else str(value(row, key)) for row in measured}
    if len(axis_values) < 2 or key not in keys:
        return None
    numeric = all(is_number(value) for value in axis_values)
    second = companion(keys, key)
    distinct = [k for k in keys if k not in (key, second) and len({repr(value(row, k)) for row in rows}) <= CONTINUOUS]
    drawn = series(measured, best, second)
    values = [chosen for _, chosen in drawn]
    slice_ = [row for row in measured if all(value(row, k) == value(best, k) for k in distinct)]
    slice_ = [row for row in slice_ if second is None or value(row, second) in values]
    traces: list[Trace] = []
    inside = {row.id for row in slice_}
    rest = [row for row in measured if row.id not in inside]
    if rest:
        xs = [value(row, key) if numeric else plain(value(row, key)) for row in rest]
        traces.append(
            faint("other trials", xs, [row.metrics["images_per_s"] for row in rest], [tip(r, unit, keys) for r in rest])
        )
    follows = model is not None and can_follow(key) and numeric
    for index, chosen in drawn:
        slice_rows = [row for row in slice_ if second is None or value(row, second) == chosen]
        if not slice_rows:
            continue
        slice_rows.sort(key=lambda row: (0, float(value(row, key)), "") if numeric else (1, 0.0, str(value(row, key))))
        name = names.at(second, chosen, unit) if second else "measured"
        colour, group = PALETTE[index % MOST_SERIES], f"s{index}"
        if follows and model is not None:
            base = {**point_of(best), **({second: chosen} if second else {})}
            predicted = curve(model, base, key, float(min(axis_values)), float(max(axis_values)))
            traces.append(band(colour, predicted.at, predicted.low, predicted.high, group))
            traces.append(
                line(name, index, predicted.at, predicted.images_per_s, legendgroup=group, showlegend=False, hoverinfo="skip")
            )
        speeds = [row.metrics["images_per_s"] for row in slice_rows]
        marks = dots(
            name,
            index,
            [value(row, key) if numeric else plain(value(row, key)) for row in slice_rows],
            speeds,
            [tip(row, unit, keys) for row in slice_rows],
            legendgroup=group,
        )
        marks["error_y"] = whiskers(colour, [(row.error or 0.0) * row.metrics["images_per_s"] for row in slice_rows])
        if numeric and not follows:
            marks |= {"mode": "lines+markers", "line": {"color": colour, "width": 1}}
        traces.append(marks)
    fixed = ", ".join(names.at(k, value(best, k), unit) for k in distinct)
    caption = "Marks are measured" + (", bars one standard error" if any(row.error for row in slice_) else "")
    caption += ", lines are the step-time model with one standard deviation." if follows else "."
    caption += f" The series have {fixed}, as the best trial." if fixed else ""
    ticks = (
        numbers_axis(names.axis(key, unit), [float(one) for one in axis_values], log=spans(axis_values))
        if numeric
        else {"title": {"text": plain(names.axis(key, unit))}, "type": "category"}
    )
    caption += names.left_out(rows, {row.id for row in measured}, "a speed")
    shown = sorted(measured, key=lambda row: -row.metrics["images_per_s"])
    table = [
        [
            str(value(row, key)),
            *(str(value(row, k)) for k in keys if k != key),
            names.number(row.metrics["images_per_s"], 1),
            error_cell(row),
            row.id,
        ]
        for row in shown
    ]
    columns = [names.axis(key, unit), *(names.axis(k, unit) for k in keys if k != key), "images/s", "± images/s", "trial"]
    return Figure(
        f"speed-{keys.index(key)}",
        f"Speed over {names.axis(key, unit)}",
        caption,
        traces,
        {"xaxis": ticks, "yaxis": y_axis("images/s")},
        columns,
        table,
    )


def companion(keys: Sequence[str], key: str) -> str | None:
    """The axis whose values are a figure's series: workers, or the batch where workers are the figure's own axis."""
    candidates = (GLOBAL_BATCH, LOADER_WORKERS) if key == NUM_WORKERS else (NUM_WORKERS, GLOBAL_BATCH, LOADER_WORKERS)
    return next((k for k in candidates if k in keys and k != key), None)


def series(measured: Sequence[Row], best: Row, second: str | None) -> list[tuple[int, Any]]:
    """The values of the second axis that may be series, those around the winner's where there are too many.

    Each with its index among them, which is the same in all figures with this second axis: it gives the value its colour.
    """
    if second is None:
        return [(0, None)]
    all_values = ordered(value(row, second) for row in measured)
    centre = all_values.index(value(best, second)) if value(best, second) in all_values else 0
    first = min(max(0, centre - MOST_SERIES // 2), max(0, len(all_values) - MOST_SERIES))
    return list(enumerate(all_values[first : first + MOST_SERIES]))


def spans(axis_values: set[Any]) -> bool:
    """Whether positive values spread over more than a factor of four: a logarithmic axis then."""
    return bool(min(axis_values) > 0 and max(axis_values) >= 4 * min(axis_values))


def tip(row: Row, unit: str, keys: Sequence[str], *more: str) -> str:
    """A trial's tooltip."""
    m, error = row.metrics, row.error
    speed = names.number(m["images_per_s"], 1) + (f" ± {names.short(error * m['images_per_s'])}" if error else "")
    return hover(f"trial {row.id}", names.point(row, unit, keys), f"{speed} images/s", *more)


def error_cell(row: Row) -> str:
    """One standard error of a trial's speed."""
    error, speed = row.error, row.metrics.get("images_per_s")
    return names.short(error * speed) if error and speed else "–"


def is_number(found: Any) -> bool:
    return isinstance(found, int | float) and not isinstance(found, bool)
