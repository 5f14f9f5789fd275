"""A sweep's figures, as pure functions of its rows: phases, waits, scaling, speed against cost."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from plotly import express
from plotly.graph_objects import Figure as Plot

from service.config.space import GLOBAL_BATCH, NUM_WORKERS
from service.report import charts
from service.report import labels as names
from service.report.charts import GREY, MAX_SERIES, VERMILION, Figure, draw, figure, mark_ticks
from service.report.run_records import Row, axes, gpu_s_per_epoch, ran, value
from service.search.planner import front as front_of
from trainables.metrics.phases import ALL_PHASES

MAX_NAMED = 40  # trials that a figure still names one by one
PHASE_COLORS = {
    "data": VERMILION,
    "h2d": "#F0E442",
    "augment": charts.SKY,
    "teacher": charts.BLUE,
    "student": charts.GREEN,
    "backward": charts.PURPLE,
    "optimizer": charts.ORANGE,
    "receive": "#000000",
    "bubble": GREY,
}


def trial_frame(rows: Sequence[Row], unit: str, keys: Sequence[str], **columns: Callable[[Row], Any]) -> pd.DataFrame:
    """A row a trial: its id, its point, its speed, and `columns`."""
    known: Mapping[str, Callable[[Row], Any]] = {
        "trial": lambda row: row.id,
        "point": lambda row: names.point(row, unit, keys),
        **columns,
        "images/s": lambda row: row.metrics["images_per_s"],
    }
    return pd.DataFrame({name: [of(row) for row in rows] for name, of in known.items()})


def metric_of(name: str) -> Callable[[Row], float]:
    return lambda row: row.metrics.get(name, np.nan)


def phases(rows: Sequence[Row], unit: str) -> Figure | None:
    """Where each trial's time goes, per 1,000 images so that batches compare, the fastest first."""
    shown = by_speed(rows, "phase/step_ms")
    if not shown:
        return None
    columns = {f"{phase} ms": metric_of(f"phase/{phase}_ms") for phase in (*ALL_PHASES, "step")}
    frame = trial_frame(shown, unit, axes(rows), **columns).dropna(axis="columns", how="all")
    batches = pd.Series([row.scale.global_batch_size for row in shown])
    parts = [
        frame[["trial", "point", "images/s"]].assign(
            phase=phase, **{"ms/step": frame[f"{phase} ms"], "s per 1,000 images": frame[f"{phase} ms"] / batches}
        )
        for phase in ALL_PHASES
        if f"{phase} ms" in frame and frame[f"{phase} ms"].any()
    ]
    return figure(
        "phases",
        "Where a step's time goes",
        "Seconds for 1,000 images, stacked by phase; lower is faster."
        + names.left_out(rows, {row.id for row in shown}, "phase times"),
        ranked(
            express.bar, pd.concat(parts), shown, "s per 1,000 images", "phase", PHASE_COLORS, ("point", "images/s", "ms/step")
        ),
        frame,
    )


def waits(rows: Sequence[Row], unit: str) -> Figure | None:
    """How long steps of each trial wait for data: the mean, and the shortest and the longest wait of any step."""
    shown = by_speed(rows, "phase/data_max_ms")
    if not shown:
        return None
    parts = {"mean ms": "", "min": "_min", "p95": "_p95", "max": "_max"}
    columns = {name: metric_of(f"phase/data{part}_ms") for name, part in parts.items()} | {"data wait %": metric_of("data_pct")}
    frame = trial_frame(shown, unit, axes(rows), **columns)
    drawn = frame.assign(up=frame["max"] - frame["mean ms"], down=frame["mean ms"] - frame["min"], series="mean, min to max")
    bars = {"error_y": "up", "error_y_minus": "down"}
    plot = ranked(express.scatter, drawn, shown, "mean ms", "series", {}, ("point", "images/s", "min", "p95", "max"), **bars)
    plot.update_traces(error_y={"color": GREY, "width": 3 if len(shown) <= MAX_NAMED else 0})
    mark = {"color": VERMILION, "symbol": "line-ew-open", "size": 12 if len(shown) <= MAX_NAMED else 5}
    plot.add_scatter(x=plot.data[0].x, y=frame["p95"], mode="markers", name="95% of steps wait less", marker=mark)
    plot.update_yaxes(title_text="ms")
    return figure(
        "waits",
        "Data wait, min to max",
        f"Milliseconds that a step waits for images: a long bar is a loader that stalls now and then. "
        f"The longest wait was {names.short(frame['max'].max())} ms." + names.left_out(rows, {row.id for row in shown}, "waits"),
        plot,
        frame,
        {"images/s": 1, "data wait %": 1},
    )


def by_speed(rows: Sequence[Row], metric: str) -> list[Row]:
    """The trials that have a metric, the fastest first."""
    return sorted((row for row in ran(rows) if metric in row.metrics), key=lambda row: -row.metrics["images_per_s"])


def ranked(
    kind: Callable[..., Plot],
    frame: pd.DataFrame,
    shown: Sequence[Row],
    y: str,
    series: str,
    colors: Mapping[str, str],
    tips: Collection[str],
    **options: Any,
) -> Plot:
    """A figure over trials by speed: over their ids where they are few."""
    if len(shown) <= MAX_NAMED:
        few = frame.rename(columns={"trial": "trial, fastest first"})
        return draw(kind, few, "trial, fastest first", y, series, (), colors, tips, **options)
    ranks = {row.id: rank for rank, row in enumerate(shown, start=1)}
    many = frame.assign(**{"rank by speed": frame["trial"].map(ranks)})
    plot = draw(kind, many, "rank by speed", y, series, (), colors, ("trial", *tips), **options)
    return plot.update_layout(bargap=0).update_traces(marker_size=4, selector={"type": "scatter"})


def efficiency(rows: Sequence[Row], best: Row, unit: str) -> Figure | None:
    """Speed per worker as a share of that with the fewest workers: 100% is ideal scaling."""
    measured = ran(rows)
    batch, workers = value(best, GLOBAL_BATCH), value(best, NUM_WORKERS)
    groups = {
        f"the best at each number of {unit}s": measured,
        f"at global batch {batch}": [row for row in measured if value(row, GLOBAL_BATCH) == batch],
        f"at batch {names.short(batch / workers)} per {unit}": [
            row for row in measured if value(row, GLOBAL_BATCH) * workers == batch * value(row, NUM_WORKERS)
        ],
    }
    frames = []
    for series, group in groups.items():
        slowest_first = sorted(group, key=lambda row: (value(row, NUM_WORKERS), row.metrics["images_per_s"]))
        fastest = {value(row, NUM_WORKERS): row for row in slowest_first}
        if len(fastest) > 1:
            frame = trial_frame(list(fastest.values()), unit, axes(rows)).assign(**{"series": series, f"{unit}s": list(fastest)})
            each = frame["images/s"] / frame[f"{unit}s"]
            frames.append(frame.assign(**{"% of ideal": 100 * each / each[0]}))
    if not frames:
        return None
    found = pd.concat(frames)
    plot = draw(express.line, found, f"{unit}s", "% of ideal", "series", tips=("trial", "point", "images/s"))
    plot.add_hline(
        y=100, line={"color": GREY, "dash": "dot", "width": 2}, annotation_text="ideal", annotation_position="top right"
    )
    mark_ticks(plot, found[f"{unit}s"].tolist())
    most = frames[0].iloc[-1]
    return figure(
        "efficiency",
        "Scaling against ideal",
        f"Images/s of each {unit}, as a share of that with the fewest {unit}s. "
        f"{names.counted(most[f'{unit}s'], unit)} reach {most['% of ideal']:.0f}% of ideal.",
        plot,
        found[["series", f"{unit}s", "trial", "images/s", "% of ideal"]],
        {"images/s": 1, "% of ideal": 0},
    )


def pareto_rows(rows: Sequence[Row]) -> list[Row]:
    """The trials that none other beats in both speed and cost, the cheapest first."""
    costed = [row for row in ran(rows) if gpu_s_per_epoch(row) is not None]
    workers_O = np.array([row.scale.num_workers for row in costed], dtype=float)
    time_O = -np.log([row.metrics["images_per_s"] for row in costed])
    return sorted((costed[index] for index in front_of(workers_O, time_O)), key=lambda row: gpu_s_per_epoch(row) or 0.0)


def pareto(rows: Sequence[Row], unit: str, found: Collection[str] = ()) -> Figure | None:
    """Speed against what an epoch costs. `found`: the trials on the front by the search's model where there was one."""
    keys, cost = axes(rows), f"{unit}-s/epoch"
    costed = [row for row in ran(rows) if gpu_s_per_epoch(row) is not None]
    if len(costed) < 2:
        return None
    by_workers = sorted(costed, key=lambda row: row.scale.num_workers)
    counts = {row.id: names.counted(row.scale.num_workers, unit) for row in by_workers}
    columns = {cost: gpu_s_per_epoch, "s/epoch": metric_of("epoch_s"), "series": lambda row: counts[row.id]}
    frame = trial_frame(costed, unit, keys, **columns)
    order = list(dict.fromkeys(counts.values()))
    if len(order) > MAX_SERIES:
        frame["series"], order = "trials", []
    plot = draw(express.scatter, frame, cost, "images/s", "series", order, tips=("trial", "point", "s/epoch"), zero=False)
    front = frame[frame["trial"].isin(list(found) or [row.id for row in pareto_rows(rows)])].sort_values(cost)
    plot.add_scatter(
        x=front[cost],
        y=front["images/s"],
        name="the search's front" if found else "nothing is faster and cheaper",
        mode="lines+markers",
        line={"color": GREY, "shape": "hv", "dash": "dot", "width": 2},
        marker={"size": 16, "symbol": "circle-open"},
        hoverinfo="skip",
    )
    summary = "; ".join(front["point"][:4]) + (" …" if len(front) > 4 else "")
    return figure(
        "pareto",
        "Speed against cost",
        f"Up is faster, left is cheaper. On the front: {summary}." + names.left_out(rows, {row.id for row in costed}, "a cost"),
        plot,
        front[["trial", "point", "images/s", cost, "s/epoch"]],
        {"images/s": 1},
    )
