"""Speed over one axis of a sweep: measured marks, the step-time model's curve, everything else in the background."""

from collections.abc import Sequence
from typing import Any

from service.config.space import GLOBAL_BATCH, LOADER_WORKERS, NUM_WORKERS, SCALE_AXES
from service.report import labels as names
from service.report import plotly_marks as marks
from service.report.model_curve import Curve, curve
from service.report.plotly_marks import MOST_SERIES, Figure, Trace
from service.report.run_records import Row, axes, ordered, ran, value
from service.search.rows import point_of
from service.search.step_time_model import StepTime

NAMED = 40  # trials that a figure still names one by one
CONTINUOUS = 12  # values of an axis above which points are not told apart by it: a distribution, not a list


def over_axis(rows: Sequence[Row], best: Row, key: str, model: StepTime | None, unit: str) -> Figure | None:
    """Speed over one axis: a series for each value of a second axis, all others as the winner has them.

    The rest is in the background. Where there is a model it draws the curve that the marks lie on, or do not.
    """
    keys, measured = axes(rows), ran(rows)
    axis_values = {value(row, key) if is_number(value(row, key)) else str(value(row, key)) for row in measured}
    if len(axis_values) < 2 or key not in keys:
        return None
    numeric = all(is_number(value) for value in axis_values)
    model = model if numeric and key in SCALE_AXES else None
    second = companion(keys, key)
    distinct = [k for k in keys if k not in (key, second) and len({repr(value(row, k)) for row in rows}) <= CONTINUOUS]
    drawn = series_values(measured, best, second)
    inside = [row for row in measured if all(value(row, k) == value(best, k) for k in distinct)]
    inside = [row for row in inside if second is None or value(row, second) in [chosen for _, chosen in drawn]]
    inside.sort(key=lambda row: (0, float(value(row, key)), "") if numeric else (1, 0.0, str(value(row, key))))

    def points(part: Sequence[Row]) -> tuple[list[Any], list[float], list[str]]:
        xs = [value(row, key) if numeric else marks.unformatted(value(row, key)) for row in part]
        return xs, [row.metrics["images_per_s"] for row in part], [tip(row, unit, keys) for row in part]

    rest = [row for row in measured if row not in inside]
    traces: list[Trace] = [marks.faint("other trials", *points(rest))] if rest else []
    for index, chosen in drawn:
        part = [row for row in inside if second is None or value(row, second) == chosen]
        if not part:
            continue
        name, group = names.at(second, chosen, unit) if second else "measured", f"s{index}"
        colour = marks.PALETTE[index % MOST_SERIES]
        measurements = marks.dots(name, index, *points(part), legendgroup=group)
        measurements["error_y"] = marks.whiskers(colour, [(row.error or 0.0) * row.metrics["images_per_s"] for row in part])
        if model is not None:
            base = {**point_of(best), **({second: chosen} if second else {})}
            traces += curve_traces(curve(model, base, key, float(min(axis_values)), float(max(axis_values))), name, index, group)
        elif numeric:
            measurements |= {"mode": "lines+markers", "line": {"color": colour, "width": 1}}
        traces.append(measurements)
    fixed = ", ".join(names.at(k, value(best, k), unit) for k in distinct)
    caption = "Marks are measured" + (", bars one standard error" if any(row.error for row in inside) else "")
    caption += ", lines are the step-time model with one standard deviation." if model is not None else "."
    caption += f" The series have {fixed}, as the best trial." if fixed else ""
    title = names.axis(key, unit)
    ticks = {"title": {"text": marks.unformatted(title)}, "type": "category"}
    if numeric:
        ticks = marks.numbers_axis(title, [float(one) for one in axis_values], log=spans(axis_values))
    columns = [key, *(k for k in keys if k != key)]
    return Figure(
        f"speed-{keys.index(key)}",
        f"Speed over {title}",
        caption + names.left_out(rows, {row.id for row in measured}, "a speed"),
        traces,
        {"xaxis": ticks, "yaxis": marks.y_axis("images/s")},
        [*(names.axis(k, unit) for k in columns), "images/s", "± images/s", "trial"],
        [
            [*(str(value(row, k)) for k in columns), names.number(row.metrics["images_per_s"], 1), error_cell(row), row.id]
            for row in sorted(measured, key=lambda row: -row.metrics["images_per_s"])
        ],
    )


def curve_traces(predicted: Curve, name: str, index: int, group: str) -> list[Trace]:
    """The model's curve of a series, with a band of its standard deviation."""
    hidden = {"legendgroup": group, "showlegend": False, "hoverinfo": "skip"}
    return [
        marks.band(marks.PALETTE[index % MOST_SERIES], predicted.at, predicted.low, predicted.high, group),
        marks.line(name, index, predicted.at, predicted.images_per_s, **hidden),
    ]


def companion(keys: Sequence[str], key: str) -> str | None:
    """The axis whose values are a figure's series: workers, or the batch where workers are the figure's own axis."""
    candidates = (GLOBAL_BATCH, LOADER_WORKERS) if key == NUM_WORKERS else (NUM_WORKERS, GLOBAL_BATCH, LOADER_WORKERS)
    return next((k for k in candidates if k in keys and k != key), None)


def series_values(measured: Sequence[Row], best: Row, second: str | None) -> list[tuple[int, Any]]:
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
    return marks.hover(f"trial {row.id}", names.point(row, unit, keys), f"{speed} images/s", *more)


def error_cell(row: Row) -> str:
    """One standard error of a trial's speed."""
    error, speed = row.error, row.metrics.get("images_per_s")
    return names.short(error * speed) if error and speed else "–"


def is_number(found: Any) -> bool:
    return isinstance(found, int | float) and not isinstance(found, bool)
