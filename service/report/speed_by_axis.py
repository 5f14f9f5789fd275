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
from service.search.step_time import StepTime

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
    measured.sort(key=lambda row: (0, float(value(row, key)), "") if numeric else (1, 0.0, str(value(row, key))))
    model = model if numeric and key in SCALE_AXES else None
    second = companion(keys, key)
    fixed = [k for k in keys if k not in (key, second) and len({repr(value(row, k)) for row in rows}) <= CONTINUOUS]
    series = series_rows(measured, best, second, fixed)
    inside = [row for _, _, part in series for row in part]

    def points(part: Sequence[Row]) -> tuple[list[Any], list[float], list[str]]:
        xs = [value(row, key) if numeric else marks.unformatted(value(row, key)) for row in part]
        return xs, [row.metrics["images_per_s"] for row in part], [tip(row, unit, keys) for row in part]

    named = {row.id for row in inside}
    rest = [row for row in measured if row.id not in named]
    traces: list[Trace] = [marks.faint("other trials", *points(rest))] if rest else []
    for index, chosen, part in series:
        name = names.at(second, chosen, unit) if second else "measured"
        measurements = measured_marks(part, name, index, points(part))
        if model is not None:
            base = {**point_of(best), **({second: chosen} if second else {})}
            traces += curve_traces(curve(model, base, key, float(min(axis_values)), float(max(axis_values))), name, index)
        elif numeric:
            measurements |= {"mode": "lines+markers", "line": {"color": marks.PALETTE[index % MOST_SERIES], "width": 1}}
        traces.append(measurements)
    title = names.axis(key, unit)
    ticks: dict[str, Any] = {"title": {"text": marks.unformatted(title)}, "type": "category"}
    if numeric:
        ticks = marks.numbers_axis(title, [float(one) for one in axis_values], log=spans(axis_values))
    columns = [key, *(k for k in keys if k != key)]
    return Figure(
        f"speed-{keys.index(key)}",
        f"Speed over {title}",
        caption(inside, best, fixed, model is not None, unit) + names.left_out(rows, {row.id for row in measured}, "a speed"),
        traces,
        {"xaxis": ticks, "yaxis": marks.y_axis("images/s")},
        [*(names.axis(k, unit) for k in columns), "images/s", "± images/s", "trial"],
        speed_cells(measured, columns),
    )


def series_rows(measured: Sequence[Row], best: Row, second: str | None, fixed: Sequence[str]) -> list[tuple[int, Any, list[Row]]]:
    """The series: index and value of the second axis, see `series_values`, and the trials that are otherwise as the best."""
    alike = [row for row in measured if all(value(row, key) == value(best, key) for key in fixed)]
    parts = [
        (index, chosen, [row for row in alike if second is None or value(row, second) == chosen])
        for index, chosen in series_values(measured, best, second)
    ]
    return [part for part in parts if part[2]]


def caption(inside: Sequence[Row], best: Row, fixed: Sequence[str], modelled: bool, unit: str) -> str:
    """What the marks and lines are, and what the series have in common."""
    text = "Marks are measured" + (", bars one standard error" if any(row.error for row in inside) else "")
    text += ", lines are the step-time model with one standard deviation." if modelled else "."
    common = ", ".join(names.at(key, value(best, key), unit) for key in fixed)
    return f"{text} The series have {common}, as the best trial." if common else text


def measured_marks(part: Sequence[Row], name: str, index: int, points: tuple[list[Any], list[float], list[str]]) -> Trace:
    """The trials of a series, with one standard error each."""
    errors = [(row.error or 0.0) * row.metrics["images_per_s"] for row in part]
    return marks.dots(name, index, *points, legendgroup=f"s{index}") | {
        "error_y": marks.whiskers(marks.PALETTE[index % MOST_SERIES], errors)
    }


def speed_cells(measured: Sequence[Row], columns: Sequence[str]) -> list[list[str]]:
    """The figure's numbers, the fastest trial first."""
    return [
        [*(str(value(row, key)) for key in columns), names.number(row.metrics["images_per_s"], 1), error_cell(row), row.id]
        for row in sorted(measured, key=lambda row: -row.metrics["images_per_s"])
    ]


def curve_traces(predicted: Curve, name: str, index: int) -> list[Trace]:
    """The model's curve of a series, with a band of its standard deviation."""
    group = f"s{index}"
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

    Each with its index among them, which is the same in all figures with this second axis: it gives the value its color.
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
    m, error = row.metrics, row.error
    speed = names.number(m["images_per_s"], 1) + (f" ± {names.short(error * m['images_per_s'])}" if error else "")
    return marks.hover(f"trial {row.id}", names.point(row, unit, keys), f"{speed} images/s", *more)


def error_cell(row: Row) -> str:
    """One standard error of a trial's speed."""
    error, speed = row.error, row.metrics.get("images_per_s")
    return names.short(error * speed) if error and speed else "–"


def is_number(found: Any) -> bool:
    return isinstance(found, int | float) and not isinstance(found, bool)
