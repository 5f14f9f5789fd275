"""The figures of a sweep, as pure functions of its trials: speed over each axis, phases, data waits, scaling, speed vs. cost."""

from collections.abc import Collection, Mapping, Sequence

import numpy as np
import pandas as pd
from plotly import express
from plotly.graph_objects import Figure as Plot

from service.config.space import GLOBAL_BATCH, NUM_WORKERS
from service.report import labels as names
from service.report.charts import (
    GREY,
    MAX_SERIES,
    PHASE_COLORS,
    VERMILION,
    Figure,
    draw,
    figure,
    mark_ticks,
    reference_line,
)
from service.report.records import Row, axes, gpu_s_per_epoch, ordered, ran, value
from trainables.metrics.phases import ALL_PHASES

MANY = 40  # trials, above which marks are small
MAX_LISTED = 12  # values of an axis above which points are not told apart by it: a distribution, not a list
STUDENT = "student.model"
OTHERS, BY_SPEED = "other trials", "trial, fastest first"


def trial_frame(rows: Sequence[Row], unit: str) -> pd.DataFrame:
    """Return a row per trial with a speed, fastest first, with columns named for readers; values of axes are text."""
    keys = axes(rows)
    found = [
        {
            "trial": row.id,
            "point": names.point(row, unit, keys),
            **{names.axis(key, unit): str(value(row, key)) for key in keys},
            "num_workers": row.scale.num_workers,
            "batch": row.scale.global_batch_size,
            "images/s": row.metrics["images_per_s"],
            "± images/s": (row.error or np.nan) * row.metrics["images_per_s"],
            "s/epoch": row.metrics.get("epoch_s", np.nan),
            "top-1 %": row.metrics.get("top1_pct", np.nan),
            "latency ms": row.metrics.get("inference_ms", np.nan),
            f"{unit}-s/epoch": gpu_s_per_epoch(row) or np.nan,
            "data wait %": row.metrics.get("data_pct", np.nan),
            **{f"data {part}": row.metrics.get(f"phase/data_{part}_ms", np.nan) for part in ("min", "p95", "max")},
            **phase_ms(row.metrics),
        }
        for row in ran(rows)
    ]
    return pd.DataFrame(found).sort_values("images/s", ascending=False, kind="stable") if found else pd.DataFrame()


def phase_ms(metrics: Mapping[str, float]) -> dict[str, float]:
    return {f"{phase} ms": metrics.get(f"phase/{phase}_ms", np.nan) for phase in (*ALL_PHASES, "step")}


def over_axis(frame: pd.DataFrame, rows: Sequence[Row], best: Row, key: str, unit: str) -> Figure | None:
    """Plot speed over one axis, with a series per value of a second axis and all other axes at the winner's values.

    All other trials are in the background. `frame` is the trial frame of `rows`.
    """
    heads = {one: names.axis(one, unit) for one in sorted(axes(rows), key=lambda one: one != key)}
    title, at_best = heads[key], {one: value(best, one) for one in heads}
    if frame[title].nunique() < 2:
        return None
    second = next((one for one in heads if one != key), None)
    fixed = [one for one in heads if one not in (key, second) and frame[heads[one]].nunique() <= MAX_LISTED]
    alike = frame[[heads[one] for one in fixed]].eq([str(at_best[one]) for one in fixed]).all(axis="columns")
    series, order = pd.Series("measured", frame.index), list[str]()
    if second is not None:
        # if there are too many, those around the winner's, in an order that gives a value the same color in all figures
        values = [str(one) for one in ordered(value(row, second) for row in (*ran(rows), best))]
        first = min(max(0, values.index(str(at_best[second])) - MAX_SERIES // 2), max(0, len(values) - MAX_SERIES))
        order = [names.at(second, one, unit) for one in values[first : first + MAX_SERIES]]
        series = frame[heads[second]].map(lambda one: names.at(second, one, unit))
        alike &= series.isin(order)
    drawn = frame.assign(series=series.where(alike, OTHERS), bar=frame["± images/s"].where(alike))
    numbers = pd.to_numeric(frame[title], errors="coerce")
    if is_numeric := bool(numbers.notna().all()):
        drawn = drawn.assign(**{title: numbers}).sort_values(title, kind="stable")
    tips = ("trial", "point", "± images/s")
    plot = draw(express.scatter, drawn, title, "images/s", "series", order, {OTHERS: GREY}, tips, error_y="bar")
    plot.update_traces(mode="lines+markers" if is_numeric else "markers", line_width=1)
    faint = {"mode": "markers", "marker": {"size": 6, "symbol": "circle-open"}, "opacity": 0.6}
    plot.update_traces(faint, selector={"name": OTHERS})
    plot.data = sorted(plot.data, key=lambda trace: trace.name != OTHERS)  # behind the others
    if is_numeric:
        mark_ticks(plot, numbers.tolist())
    caption = "Markers are measurements" + (", bars one standard error." if drawn["bar"].notna().any() else ".")
    alike_in = ", ".join(names.at(one, at_best[one], unit) for one in fixed)
    caption += f" The series have {alike_in}, like the best trial." if fixed else ""
    shown = frame[[*heads.values(), "images/s", "± images/s", "trial"]]
    return figure(f"speed-{axes(rows).index(key)}", f"Speed over {title}", caption, plot, shown)


def phases(frame: pd.DataFrame, what: str) -> Figure | None:
    """Plot the phase times of each trial or stage, per 1,000 images so that batch sizes compare.

    `frame` has milliseconds by phase, and the `batch`; `what` is the column with the name of the trial or stage.
    """
    frame = frame.dropna(subset="step ms") if "step ms" in frame else pd.DataFrame()
    if frame.empty:
        return None
    used = [f"{phase} ms" for phase in ALL_PHASES if frame[f"{phase} ms"].sum() > 0]
    about = [name for name in (what, "point", "images/s", "batch") if name in frame]
    long = frame.melt(about, used, "phase", "ms/step").assign(phase=lambda long: long["phase"].str.removesuffix(" ms"))
    long["s per 1,000 images"] = long["ms/step"] / long["batch"]
    plot = draw(express.bar, long, what, "s per 1,000 images", "phase", colors=PHASE_COLORS, tips=[*about[1:], "ms/step"])
    plot.update_layout(bargap=0 if len(frame) > MANY else 0.2)
    caption = "Seconds per 1,000 images, stacked by phase; lower is faster."
    return figure("phases", "Where a step's time goes", caption, plot, frame[[*about, *used, "step ms"]])


def waits(frame: pd.DataFrame) -> Figure | None:
    """Plot how long the steps of each trial wait for data: the mean, minimum, 95th percentile and maximum."""
    frame = frame.dropna(subset="data max") if len(frame) else frame
    if frame.empty:
        return None
    mean, few = frame["data ms"], len(frame) <= MANY
    drawn = frame.assign(up=frame["data max"] - mean, down=mean - frame["data min"], series="mean, min to max")
    drawn, tips = drawn.rename(columns={"trial": BY_SPEED}), ("point", "images/s", "data min", "data p95", "data max")
    plot = draw(express.scatter, drawn, BY_SPEED, "data ms", "series", tips=tips, error_y="up", error_y_minus="down")
    plot.update_traces(error_y={"color": GREY, "width": 3 if few else 0}, marker_size=9 if few else 4)
    mark = {"color": VERMILION, "symbol": "line-ew-open", "size": 12 if few else 5}
    plot.add_scatter(x=plot.data[0].x, y=frame["data p95"], mode="markers", name="95% of steps wait less", marker=mark)
    return figure(
        "waits",
        "Data wait, min to max",
        f"Milliseconds that a step waits for images; a long bar means that the loader stalls now and then. "
        f"The longest wait was {names.short(frame['data max'].max())} ms.",
        plot.update_yaxes(title_text="ms"),
        frame[["trial", "point", "data ms", "data min", "data p95", "data max", "data wait %", "images/s"]],
    )


def efficiency(frame: pd.DataFrame, best: Row, unit: str) -> Figure | None:
    """Plot the speed per worker relative to that with the fewest workers: 100% is ideal scaling."""
    at, batch, workers = f"{unit}s", value(best, GLOBAL_BATCH), value(best, NUM_WORKERS)
    frame = frame.assign(**{at: frame["num_workers"]})
    groups = {
        f"fastest at each number of {at}": frame[at] > 0,
        f"at global batch {batch}": frame["batch"] == batch,
        f"at batch {names.short(batch / workers)} per {unit}": frame["batch"] * workers == batch * frame[at],
    }
    found = []
    for series, chosen in groups.items():
        fastest = frame[chosen].drop_duplicates(at).sort_values(at).assign(series=series)
        each = fastest["images/s"] / fastest[at]
        found += [fastest.assign(**{"% of ideal": 100 * each / each.iloc[0]})] if len(fastest) > 1 else []
    if not found:
        return None
    drawn, most = pd.concat(found), found[0].iloc[-1]
    plot = draw(express.line, drawn, at, "% of ideal", "series", tips=("trial", "point", "images/s"))
    reference_line(plot, 100, "ideal")
    mark_ticks(plot, drawn[at].tolist())
    return figure(
        "efficiency",
        "Scaling against ideal",
        f"Images/s per {unit}, relative to that with the fewest {at}. "
        f"{names.counted(most[at], unit)} reach {most['% of ideal']:.0f}% of ideal.",
        plot,
        drawn[["series", at, "trial", "images/s", "% of ideal"]],
    )


def pareto(frame: pd.DataFrame, unit: str, found: Collection[str] = ()) -> Figure | None:
    """Plot speed against the cost of an epoch. `found` are the trials on the front by the search's model, if it has one."""
    cost = f"{unit}-s/epoch"
    frame = frame.dropna(subset=cost).sort_values([cost, "images/s"], ascending=[True, False]) if len(frame) else frame
    if len(frame) < 2:
        return None
    counts = {count: names.counted(count, unit) for count in sorted(frame["num_workers"].unique())}
    frame["series"] = frame["num_workers"].map(counts) if len(counts) <= MAX_SERIES else "trials"
    tips = ("trial", "point", "s/epoch")
    plot = draw(express.scatter, frame, cost, "images/s", "series", [*counts.values()][:MAX_SERIES], tips=tips, zero=False)
    is_faster = frame["images/s"] > frame["images/s"].cummax().shift(fill_value=0.0)
    front = frame[frame["trial"].isin(list(found)) if found else is_faster]
    mark_front(plot, front[cost], front["images/s"], "Pareto front of the search" if found else "Pareto front")
    caption = f"Up is faster, left is cheaper. On the front: {'; '.join(front['point'][:4])}{' …' if len(front) > 4 else ''}."
    return figure("pareto", "Speed against cost", caption, plot, front[["trial", "point", "images/s", cost, "s/epoch"]])


def accuracy_latency(frame: pd.DataFrame, rows: Sequence[Row]) -> Figure | None:
    """Accuracy against the latency of trained students, where a sweep has several. `frame`: that of the rows."""
    if STUDENT not in axes(rows):
        return None
    frame = frame.dropna(subset=["top-1 %", "latency ms"]).sort_values(["latency ms", "top-1 %"], ascending=[True, False])
    if len(frame) < 2:
        return None
    frame["series"] = [str(value(row, STUDENT)) for row in map({row.id: row for row in rows}.__getitem__, frame["trial"])]
    plot = draw(express.scatter, frame, "latency ms", "top-1 %", "series", tips=("trial", "point"), zero=False)
    front = frame[frame["top-1 %"] > frame["top-1 %"].cummax().shift(fill_value=-1.0)]
    mark_front(plot, front["latency ms"], front["top-1 %"], "Pareto front")
    return figure(
        "latency",
        "Accuracy against latency",
        "Up is more accurate, left is faster: a forward pass on one image, on the device that trained the student. "
        f"On the front: {', '.join(front['series'])}.",
        plot,
        frame[["trial", "series", "top-1 %", "latency ms", "images/s"]],
    )


def mark_front(plot: Plot, x: pd.Series, y: pd.Series, name: str) -> None:
    """Circle the points of a front and join them by steps."""
    line, marker = {"color": GREY, "shape": "hv", "dash": "dot", "width": 2}, {"size": 16, "symbol": "circle-open"}
    plot.add_scatter(x=x, y=y, name=name, mode="lines+markers", line=line, marker=marker, hoverinfo="skip")
