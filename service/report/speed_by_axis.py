"""Speed over one axis of a sweep: measured marks, the step-time model's curve, everything else in the background."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from plotly import express
from plotly.graph_objects import Figure as Plot

from service.config.space import GLOBAL_BATCH, LOADER_WORKERS, NUM_WORKERS, SCALE_AXES
from service.report import labels as names
from service.report.charts import DASHES, GREY, MAX_SERIES, SYMBOLS, Figure, add_band, draw, escaped, figure, mark_ticks
from service.report.figures import trial_frame
from service.report.records import Row, axes, ordered, ran, value
from service.runs.result import RunResult
from service.search.points import Point
from service.search.replay import hardware_of, observation
from service.search.rows import point_of
from service.search.step_time import StepTime, fit_step_times

MAX_LISTED = 12  # values of an axis above which points are not told apart by it: a distribution, not a list
MIN_FITTED, MAX_FITTED = 4, 120  # points: fewer show the model's prior, more tell the curve nothing new and take seconds
CURVE_POINTS = 33
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
    order = (GLOBAL_BATCH, LOADER_WORKERS) if key == NUM_WORKERS else (NUM_WORKERS, GLOBAL_BATCH, LOADER_WORKERS)
    second = next((k for k in order if k in keys and k != key), None)
    fixed = [k for k in keys if k not in (key, second) and len({repr(value(row, k)) for row in rows}) <= MAX_LISTED]
    series = series_values(measured, best, second, unit)

    def series_of(row: Row) -> str:
        alike = all(value(row, k) == value(best, k) for k in fixed)
        return next((name for name, chosen in series.items() if alike and (not second or value(row, second) == chosen)), OTHERS)

    columns = {names.axis(k, unit): lambda row, k=k: value(row, k) if numeric and k == key else str(value(row, k)) for k in keys}
    errors = {"± images/s": lambda row: (row.error or np.nan) * row.metrics["images_per_s"]}
    frame = trial_frame(rows, unit, {}, **columns, **errors, series=series_of)
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
                add_curve(plot, curve(model, base, key, min(values), max(values)), name)
    elif numeric:
        for trace in plot.data:
            trace.update(mode="markers" if trace.name == OTHERS else "lines+markers", line_width=1)
    if numeric:
        mark_ticks(plot, [float(one) for one in values])
    caption = "Marks are measured" + (", bars one standard error" if frame["bar"].notna().any() else "")
    caption += ", lines are the step-time model with one standard deviation." if modelled else "."
    if fixed:
        caption += f" The series have {', '.join(names.at(k, value(best, k), unit) for k in fixed)}, as the best trial."
    return figure(
        f"speed-{keys.index(key)}",
        f"Speed over {title}",
        caption + names.left_out(rows, set(frame["trial"]), "a speed"),
        plot,
        frame[[title, *(name for name in columns if name != title), "images/s", "± images/s", "trial"]],
    )


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


def model_of(result: RunResult, rows: Sequence[Row]) -> StepTime | None:
    """The step-time model fitted to measured rows; None where these are too few, or where the hardware is not known."""
    measured = [row for row in ran(rows) if row.status == "ok" and all(isinstance(row.scale.by_key[k], int) for k in SCALE_AXES)]
    if not result.hardware or len(measured) < MIN_FITTED:
        return None
    if len(measured) > MAX_FITTED:
        chosen = np.random.default_rng(0).choice(len(measured), MAX_FITTED, replace=False)
        measured = [measured[index] for index in sorted(chosen)]
    return fit_step_times(
        [point_of(row) for row in measured], [observation(row) for row in measured], hardware_of(result.hardware)
    )


def curve(model: StepTime, base: Point, key: str, low: float, high: float) -> pd.DataFrame:
    """Images/s along `key`, every other value as in `base`: `at`, `images_per_s`, and one standard deviation, `low` to `high`."""
    if key == GLOBAL_BATCH:
        # Batches that the workers share evenly: between them the largest share is what counts, in jumps.
        workers = base[NUM_WORKERS]
        at = np.unique((np.geomspace(low, high, CURVE_POINTS) / workers).round().clip(1) * workers)
    else:
        at = np.unique(np.linspace(low, high, min(CURVE_POINTS, round(high - low) + 1)).round())
    points = [{**base, key: int(index)} for index in at]
    predicted = model.predict(points)
    speed = np.array([float(point[GLOBAL_BATCH]) for point in points]) / predicted.step_s
    off = 1 + predicted.step_sd_s / predicted.step_s
    return pd.DataFrame({"at": at, "images_per_s": speed, "low": speed / off, "high": speed * off})


def add_curve(plot: Plot, predicted: pd.DataFrame, name: str) -> None:
    """A series' curve in the color of its marks, with a band of its standard deviation."""
    marks = next(trace for trace in plot.data if trace.name == escaped(name))
    add_band(plot, marks.marker.color, predicted, ["at", "low", "high"], name)
    style = {"color": marks.marker.color, "width": 2, "dash": DASHES[SYMBOLS.index(marks.marker.symbol)]}
    hidden = {"legendgroup": marks.legendgroup, "showlegend": False, "hoverinfo": "skip"}
    plot.add_scatter(x=predicted["at"], y=predicted["images_per_s"], mode="lines", line=style, **hidden)
