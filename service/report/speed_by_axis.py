"""Speed over one axis of a sweep: measured marks, the step-time model's curve, everything else in the background."""

from collections.abc import Sequence
from typing import Any

from plotly import express
from plotly.graph_objects import Figure as Plot

from service.config.space import GLOBAL_BATCH, LOADER_WORKERS, NUM_WORKERS, SCALE_AXES
from service.report import labels as names
from service.report.charts import DASHES, GREY, MAX_SERIES, SYMBOLS, Figure, add_band, draw, escaped, figure, mark_ticks
from service.report.figures import trial_frame
from service.report.model_curve import curve
from service.report.run_records import Row, axes, ordered, ran, value
from service.search.rows import point_of
from service.search.step_time import StepTime

MAX_LISTED = 12  # values of an axis above which points are not told apart by it: a distribution, not a list
OTHERS = "other trials"


def over_axis(rows: Sequence[Row], best: Row, key: str, model: StepTime | None, unit: str) -> Figure | None:
    """Speed over one axis: a series for each value of a second axis, all others as the winner has them.

    The rest is in the background. Where there is a model it draws the curve that the marks lie on, or do not.
    """
    keys, measured, title = axes(rows), ran(rows), names.axis(key, unit)
    values = [value(row, key) for row in measured]
    if key not in keys or len(set(map(repr, values))) < 2:
        return None
    numeric = all(isinstance(one, int | float) and not isinstance(one, bool) for one in values)
    second = companion(keys, key)
    fixed = [k for k in keys if k not in (key, second) and len({repr(value(row, k)) for row in rows}) <= MAX_LISTED]
    series = series_values(measured, best, second, unit)

    def series_of(row: Row) -> str:
        alike = all(value(row, k) == value(best, k) for k in fixed)
        return next((name for name, chosen in series.items() if alike and (not second or value(row, second) == chosen)), OTHERS)

    def error(row: Row) -> float:
        return (row.error or float("nan")) * float(row.metrics["images_per_s"])

    own = {names.axis(k, unit): lambda row, k=k: value(row, k) if numeric and k == key else str(value(row, k)) for k in keys}
    frame = trial_frame(measured, unit, keys, **own, series=series_of, **{"± images/s": error})
    frame["bar"] = frame["± images/s"].where(frame["series"] != OTHERS)
    drawn, tips = frame.sort_values(title, kind="stable"), ("trial", "point", "± images/s")
    plot = draw(express.scatter, drawn, title, "images/s", "series", list(series), {OTHERS: GREY}, tips, error_y="bar")
    plot.data = sorted(plot.data, key=lambda trace: trace.name != OTHERS)  # behind the others
    plot.update_traces(marker={"size": 6, "symbol": "circle-open"}, opacity=0.6, selector={"name": OTHERS})
    modelled = model is not None and numeric and key in SCALE_AXES
    if model is not None and modelled:
        for name, chosen in series.items():
            base = {**point_of(best), **({second: chosen} if second else {})}
            if name in set(frame["series"]):
                add_curve(plot, model, base, key, [float(one) for one in values], name)
    elif numeric:
        for trace in plot.data:
            trace.update(mode="markers" if trace.name == OTHERS else "lines+markers", line_width=1)
    if numeric:
        mark_ticks(plot, [float(one) for one in values])
    caption = "Marks are measured" + (", bars one standard error" if frame["bar"].notna().any() else "")
    caption += ", lines are the step-time model with one standard deviation." if modelled else "."
    if fixed:
        caption += f" The series have {', '.join(names.at(k, value(best, k), unit) for k in fixed)}, as the best trial."
    columns = [title, *(name for name in own if name != title), "images/s", "± images/s", "trial"]
    return figure(
        f"speed-{keys.index(key)}",
        f"Speed over {title}",
        caption + names.left_out(rows, {row.id for row in measured}, "a speed"),
        plot,
        frame.sort_values("images/s", ascending=False)[columns],
        {"images/s": 1, "± images/s": 1},
    )


def add_curve(plot: Plot, model: StepTime, base: dict[str, Any], key: str, values: Sequence[float], name: str) -> None:
    """The model's curve of a series in the color of its marks, with a band of its standard deviation."""
    marks = next(trace for trace in plot.data if trace.name == escaped(name))
    predicted, color = curve(model, base, key, min(values), max(values)), marks.marker.color
    add_band(plot, color, predicted.at, predicted.low, predicted.high, name)
    style = {"color": color, "width": 2, "dash": DASHES[SYMBOLS.index(marks.marker.symbol)]}
    hidden = {"legendgroup": marks.legendgroup, "showlegend": False, "hoverinfo": "skip"}
    plot.add_scatter(x=predicted.at, y=predicted.images_per_s, mode="lines", line=style, **hidden)


def companion(keys: Sequence[str], key: str) -> str | None:
    """The axis whose values are a figure's series: workers, or the batch where workers are the figure's own axis."""
    candidates = (GLOBAL_BATCH, LOADER_WORKERS) if key == NUM_WORKERS else (NUM_WORKERS, GLOBAL_BATCH, LOADER_WORKERS)
    return next((k for k in candidates if k in keys and k != key), None)


def series_values(measured: Sequence[Row], best: Row, second: str | None, unit: str) -> dict[str, Any]:
    """The values of the second axis that may be series, those around the winner's where there are too many.

    Each by its name, in an order that is the same in all figures with this second axis: it gives the value its color.
    """
    if second is None:
        return {"measured": None}
    all_values = ordered(value(row, second) for row in measured)
    centre = all_values.index(value(best, second)) if value(best, second) in all_values else 0
    first = min(max(0, centre - MAX_SERIES // 2), max(0, len(all_values) - MAX_SERIES))
    return {names.at(second, one, unit): one for one in all_values[first : first + MAX_SERIES]}
