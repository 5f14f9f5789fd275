"""A sweep's figures, as pure functions of its rows: phases, waits, scaling, speed against cost."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from plotly import express

from service.config.space import GLOBAL_BATCH, NUM_WORKERS
from service.report import labels as names
from service.report.charts import (
    BLUE,
    GREEN,
    GREY,
    MAX_SERIES,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    Figure,
    draw,
    figure,
    mark_ticks,
    reference_line,
)
from service.report.records import Row, axes, gpu_s_per_epoch, ran, value
from trainables.metrics.phases import ALL_PHASES

MANY = 40  # trials, above which marks are small
BY_SPEED = "trial, fastest first"
YELLOW, BLACK = "#F0E442", "#000000"
PHASE_COLORS = dict(zip(ALL_PHASES, (VERMILION, YELLOW, SKY, BLUE, GREEN, PURPLE, ORANGE, BLACK, GREY), strict=True))


def trial_frame(rows: Sequence[Row], unit: str, metrics: Mapping[str, str], **columns: Any) -> pd.DataFrame:
    """A row for each trial with a speed, the fastest first: id, point, `columns`, the metrics by their heads (or NaN), speed."""
    keys = axes(rows)
    found = [
        (
            row.id,
            names.point(row, unit, keys),
            *(of(row) for of in columns.values()),
            *(row.metrics.get(name, np.nan) for name in metrics.values()),
            row.metrics["images_per_s"],
        )
        for row in ran(rows)
    ]
    frame = pd.DataFrame(found, columns=["trial", "point", *columns, *metrics, "images/s"])
    return frame.sort_values("images/s", ascending=False, kind="stable")


def phases(rows: Sequence[Row], unit: str) -> Figure | None:
    """Where each trial's time goes, per 1,000 images so that batches compare, the fastest first."""
    metrics = {phase: f"phase/{phase}_ms" for phase in (*ALL_PHASES, "step")}
    frame = trial_frame(rows, unit, metrics, batch=lambda row: row.scale.global_batch_size).dropna(subset="step")
    if frame.empty:
        return None
    used = [phase for phase in ALL_PHASES if frame[phase].sum() > 0]
    long = frame.rename(columns={"trial": BY_SPEED})
    long = long.melt([BY_SPEED, "point", "images/s", "batch"], used, "phase", "ms/step")
    long["s per 1,000 images"] = long["ms/step"] / long["batch"]
    tips = ("point", "images/s", "ms/step")
    plot = draw(express.bar, long, BY_SPEED, "s per 1,000 images", "phase", colors=PHASE_COLORS, tips=tips)
    numbers = frame[["trial", "point", *used, "step", "images/s"]].rename(
        columns={name: f"{name} ms" for name in (*used, "step")}
    )
    return figure(
        "phases",
        "Where a step's time goes",
        "Seconds for 1,000 images, stacked by phase; lower is faster." + names.left_out(rows, set(frame["trial"]), "phase times"),
        plot.update_layout(bargap=0 if len(frame) > MANY else 0.2),
        numbers,
    )


def waits(rows: Sequence[Row], unit: str) -> Figure | None:
    """How long steps of each trial wait for data: the mean, and the shortest and the longest wait of any step."""
    metrics = {
        head: f"phase/data{part}_ms" for head, part in {"mean ms": "", "min": "_min", "p95": "_p95", "max": "_max"}.items()
    }
    frame = trial_frame(rows, unit, metrics | {"data wait %": "data_pct"}).dropna(subset="max")
    if frame.empty:
        return None
    drawn = frame.assign(up=frame["max"] - frame["mean ms"], down=frame["mean ms"] - frame["min"], series="mean, min to max")
    drawn, tips = drawn.rename(columns={"trial": BY_SPEED}), ("point", "images/s", "min", "p95", "max")
    few = len(frame) <= MANY
    plot = draw(express.scatter, drawn, BY_SPEED, "mean ms", "series", tips=tips, error_y="up", error_y_minus="down")
    plot.update_traces(error_y={"color": GREY, "width": 3 if few else 0}, marker_size=9 if few else 4)
    mark = {"color": VERMILION, "symbol": "line-ew-open", "size": 12 if few else 5}
    plot.add_scatter(x=plot.data[0].x, y=frame["p95"], mode="markers", name="95% of steps wait less", marker=mark)
    return figure(
        "waits",
        "Data wait, min to max",
        f"Milliseconds that a step waits for images: a long bar is a loader that stalls now and then. "
        f"The longest wait was {names.short(frame['max'].max())} ms." + names.left_out(rows, set(frame["trial"]), "waits"),
        plot.update_yaxes(title_text="ms"),
        frame,
    )


def efficiency(rows: Sequence[Row], best: Row, unit: str) -> Figure | None:
    """Speed per worker as a share of that with the fewest workers: 100% is ideal scaling."""
    at, batch, workers = f"{unit}s", value(best, GLOBAL_BATCH), value(best, NUM_WORKERS)
    columns = {at: lambda row: value(row, NUM_WORKERS), "batch": lambda row: value(row, GLOBAL_BATCH)}
    frame = trial_frame(rows, unit, {}, **columns)
    groups = {
        f"the best at each number of {at}": frame[at] > 0,
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
        f"Images/s of each {unit}, as a share of that with the fewest {at}. "
        f"{names.counted(most[at], unit)} reach {most['% of ideal']:.0f}% of ideal.",
        plot,
        drawn[["series", at, "trial", "images/s", "% of ideal"]],
    )


def pareto(rows: Sequence[Row], unit: str, found: Collection[str] = ()) -> Figure | None:
    """Speed against what an epoch costs. `found`: the trials on the front by the search's model where there was one."""
    cost = f"{unit}-s/epoch"
    columns = {cost: gpu_s_per_epoch, "workers": lambda row: row.scale.num_workers}
    frame = trial_frame(rows, unit, {"s/epoch": "epoch_s"}, **columns).dropna(subset=cost)
    if len(frame) < 2:
        return None
    frame = frame.sort_values([cost, "images/s"], ascending=[True, False])
    counts = {count: names.counted(count, unit) for count in sorted(frame["workers"].unique())}
    frame["series"] = frame["workers"].map(counts) if len(counts) <= MAX_SERIES else "trials"
    tips = ("trial", "point", "s/epoch")
    plot = draw(express.scatter, frame, cost, "images/s", "series", [*counts.values()][:MAX_SERIES], tips=tips, zero=False)
    is_faster = frame["images/s"] > frame["images/s"].cummax().shift(fill_value=0.0)
    front = frame[frame["trial"].isin(list(found)) if found else is_faster]
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
        f"Up is faster, left is cheaper. On the front: {summary}." + names.left_out(rows, set(frame["trial"]), "a cost"),
        plot,
        front[["trial", "point", "images/s", cost, "s/epoch"]],
    )
