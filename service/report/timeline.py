"""Figures over time, as pure functions of what stages wrote while they ran: loss, accuracy, epochs, speed, waits, hardware."""

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from plotly import express
from plotly.graph_objects import Figure as Plot

from service.report import labels as names
from service.report.charts import GREY, MAX_SERIES, PALETTE, Figure, add_band, draw, escaped, figure
from service.report.records import Histories, Row
from trainables.rundir import final_names

MAX_POINTS = 400  # of one line: more are not seen
MAX_FAINT = 60
MIN_EPOCHS = 3
ACCURACIES = {"val/top1_pct": ("Accuracy", "top-1 %"), "val/cka": ("Agreement with the teacher", "CKA")}
HARDWARE = (
    ("utilization", "GPU utilization", r"gpu\d+/util", "pct", "%", True),
    ("temperature", "GPU temperature", r"gpu\d+/temperature", "c", "°C", False),
    ("clocks", "GPU clocks (SM)", r"gpu\d+/sm_clock", "mhz", "MHz", False),
    ("cpu", "CPU use of the nodes", "cpu", "pct", "%", True),
)
"""Figure, title, metric of a node, its unit there and here, and whether the axis begins at zero."""


def recorded(histories: Histories, kind: str, *metrics: str) -> pd.DataFrame:
    """The events of one kind that have these metrics, all finite: `what` (the stage), `epoch`, `at_s` since its start."""
    columns = ["what", "epoch", "at_s", *metrics]
    found = [
        (label, one["epoch"], (one["time_ms"] - lines[0]["time_ms"]) / 1e3, *(one["metrics"].get(name) for name in metrics))
        for label, lines in histories.items()
        for one in lines
        if one["kind"] == kind
    ]
    frame = pd.DataFrame(found, columns=columns)
    frame[columns[1:]] = frame[columns[1:]].apply(pd.to_numeric, errors="coerce")
    return frame.replace([np.inf, -np.inf], np.nan).dropna()


def downsampled(lines: pd.DataFrame) -> pd.DataFrame:
    """At most `MAX_POINTS` of each stage, spread evenly, the last one among them."""
    if lines.empty:  # its columns have no types
        return lines
    back = lines.groupby("what").cumcount(ascending=False)
    steps = (lines["what"].value_counts() / MAX_POINTS).map(math.ceil)
    return lines[back % lines["what"].map(steps) == 0]


def clock(longest_s: float) -> tuple[str, float]:
    """The unit that suits the longest of several times, and its seconds."""
    return ("s", 1.0) if longest_s < 180 else ("min", 60.0) if longest_s < 10_800 else ("h", 3600.0)


def highlighted(
    frame: pd.DataFrame, chosen: Sequence[str], x: str, y: str, rows: Sequence[Row], missing: str
) -> tuple[Plot, str]:
    """A line for each stage, those `chosen` in color and others in the background, with words for the figure's caption.

    The n-th that was chosen has the n-th color, whether others are in this figure or not. `rows`, `missing`: as in `left_out`.
    """
    chosen = chosen[:MAX_SERIES]
    rest = [label for label in dict.fromkeys(frame["what"]) if label not in chosen]
    plot = draw(express.line, frame[frame["what"].isin([*chosen, *rest[:MAX_FAINT]])], x, y, "what", chosen, zero=False)
    in_color = {escaped(label) for label in chosen}
    for trace in plot.data:
        if trace.name not in in_color:
            trace.update(mode="lines", opacity=0.5, showlegend=False, line={"color": GREY, "width": 1, "dash": "solid"})
    plot.data = sorted(plot.data, key=lambda trace: trace.name in in_color)  # faint ones behind the others
    caption = f" In color: the best and the most accurate; {len(rest[:MAX_FAINT])} others faint" if rest else ""
    caption += f", {len(rest) - MAX_FAINT} more in the numbers alone" if len(rest) > MAX_FAINT else ""
    shown = {str(label).removeprefix("trial ") for label in frame["what"]}
    return plot, (f"{caption}." if caption else "") + names.left_out(rows, shown, missing)


def by_rank(frame: pd.DataFrame, chosen: Sequence[str]) -> pd.DataFrame:
    """The rows of those `chosen` in their order, then the others."""
    ranks = {label: rank for rank, label in enumerate(chosen)}
    return frame.sort_values("what", key=lambda labels: labels.map(ranks).fillna(len(ranks)), kind="stable")


def accuracy(histories: Histories, chosen: Sequence[str], rows: Sequence[Row] = ()) -> Figure | None:
    """Validation accuracy against wall time, or without any the agreement with the teacher.

    Those `chosen` by their label are in color, others in the background. `rows`: all trials of a sweep.
    """
    frames = {metric: by_rank(recorded(histories, "epoch", metric), chosen) for metric in ACCURACIES}
    metric = next((metric for metric, frame in frames.items() if len(frame)), "")
    if not metric:
        return None
    found, (title, text) = frames[metric], ACCURACIES[metric]
    unit, factor = clock(found["at_s"].max())
    found = found.rename(columns={metric: text}).assign(**{unit: found["at_s"] / factor})
    plot, caption = highlighted(found, chosen, unit, text, rows, "an evaluated epoch")
    plot.update_xaxes(rangemode="tozero")
    parts: Any = {"epochs": ("epoch", "last"), f"best {text}": (text, "max"), f"last {text}": (text, "last")}
    numbers = found.groupby("what", sort=False).agg(**parts, **{f"time {unit}": (unit, "last")}).reset_index()
    return figure(
        "accuracy",
        f"{title} against wall time",
        f"Validation {text.removesuffix(' %')} at each epoch's end, by the time since the stage began.{caption}",
        plot,
        numbers.assign(epochs=numbers["epochs"].map("{:g}".format)),
    )


def drift(histories: Histories, chosen: Sequence[str], rows: Sequence[Row] = ()) -> Figure | None:
    """Whether epochs grow longer, as they do where a GPU gets hot. `chosen`, `rows`: as in `accuracy`."""
    found = by_rank(recorded(histories, "epoch", "epoch/train_s").rename(columns={"epoch/train_s": "s"}), chosen)
    found = found[found.groupby("what")["s"].transform("size") >= MIN_EPOCHS]
    if found.empty:
        return None
    plot, caption = highlighted(found, chosen, "epoch", "s", rows, f"{MIN_EPOCHS} whole epochs")
    each = found.groupby("what", sort=False)["s"]
    # The first epoch has the warm-up in it.
    numbers = pd.DataFrame({"first s": each.first(), "second s": each.nth(1).to_numpy(), "last s": each.last()})
    numbers["second to last"] = (numbers["last s"] / numbers["second s"] - 1).map("{:+.1%}".format)
    words = [
        f"{label} {names.short(one['second s'])} → {names.short(one['last s'])} s ({one['second to last']})"
        for label, one in numbers.iloc[:3].iterrows()
    ]
    return figure(
        "drift",
        "Steps of each epoch",
        f"Seconds of training, without evaluation and checkpoints. From the second to the last: {'; '.join(words)}.{caption}",
        plot,
        numbers.reset_index(),
    )


def losses(histories: Histories) -> Figure | None:
    """Training loss at the log lines, validation loss at the epochs' ends."""
    steps = downsampled(recorded(histories, "step", "train/loss")).rename(columns={"train/loss": "loss"})
    epochs = recorded(histories, "epoch", "val/loss").rename(columns={"val/loss": "loss"})
    if steps.empty and epochs.empty:
        return None
    labels = list(histories)
    plot = draw(express.line, steps, "epoch", "loss", "what", labels, zero=False, markers=False)
    plot.for_each_trace(lambda trace: trace.update(name=f"{trace.name}, training"))
    validated = draw(express.scatter, epochs, "epoch", "loss", "what", labels)
    validated.for_each_trace(lambda trace: trace.update(name=f"{trace.name}, validation"))
    plot.add_traces(validated.data)
    training = recorded(histories, "epoch", "epoch/train/loss").rename(columns={"epoch/train/loss": "training"})
    numbers = epochs.rename(columns={"loss": "validation"}).merge(training, how="left", on=["what", "epoch"])
    return figure(
        "loss",
        "Loss",
        "Lines are the training loss at its log lines, marks the validation loss at each epoch's end.",
        plot,
        numbers.assign(epoch=numbers["epoch"].map("{:g}".format))[["what", "epoch", "training", "validation"]],
    )


def speeds(histories: Histories) -> Figure | None:
    caption = "Images trained on per second between log lines, over all workers."
    return over_steps(histories, "speed", "Speed over time", "images/s", caption, "train/images_per_s")


def waits_over_time(histories: Histories) -> Figure | None:
    """How long a step waits for data, with the shortest and the longest wait between log lines."""
    caption = "Milliseconds that a step of rank 0 waits for images: the mean, and the span between log lines."
    parts = [f"train/phase/data{part}_ms" for part in ("", "_min", "_max")]
    return over_steps(histories, "waits", "Data wait, min to max", "ms/step", caption, *parts)


def over_steps(histories: Histories, id: str, title: str, unit: str, caption: str, metric: str, *span: str) -> Figure | None:
    """A metric at the log lines; `span`: those of its lower and upper end."""
    found = downsampled(recorded(histories, "step", metric)).rename(columns={metric: unit})
    if found.empty:
        return None
    labels = list(histories)
    plot = draw(express.line, found, "epoch", unit, "what", labels, markers=False)
    for label, part in downsampled(recorded(histories, "step", *span)).groupby("what") if span else ():
        color = PALETTE[labels.index(str(label)) % MAX_SERIES]
        add_band(plot, color, part, ["epoch", *span], str(label))
    numbers = found.groupby("what", sort=False)[unit].agg(["min", "median", "max", "last"])
    return figure(id, title, caption, plot, numbers.reset_index())


def hardware(histories: Histories) -> list[Figure]:
    """What GPUs and nodes did, a point per epoch or, of a timing trial, a point per trial."""
    samples = [
        {"time_ms": one["time_ms"], "what": label, **final_names(one["metrics"])}
        for label, lines in histories.items()
        for one in [one for one in lines if one["kind"] == "epoch"] or [one for one in lines if one["kind"] == "summary"]
    ]
    if not samples:
        return []
    wide = pd.DataFrame(samples).sort_values("time_ms", kind="stable")
    at_s = (wide["time_ms"] - min(lines[0]["time_ms"] for lines in histories.values())) / 1e3
    unit, factor = clock(at_s.iloc[-1])
    when = f"{unit} since the start"
    wide = pd.concat([wide, (at_s / factor).rename(when)], axis="columns")
    found = []
    for id, title, metric, ending, of, zero in HARDWARE:
        measured = sorted((name for name in wide if re.fullmatch(rf"node\d+/{metric}_{ending}", name)), key=names.natural)
        if not measured:
            continue
        series = {name: name.rpartition("/")[0] for name in measured}
        long = wide.rename(columns=series).melt([when, "what"], list(series.values()), "where", of).dropna(subset=of)
        caption = "Means of each epoch or trial"
        if len(series) > MAX_SERIES:
            each = long.groupby(when)[of].agg(["min", "mean", "max"]).reset_index()
            each = each.rename(columns={"mean": of}).assign(where=f"mean of {len(series)}")
            plot = draw(express.line, each, when, of, "where", markers=False, zero=zero)
            add_band(plot, PALETTE[0], each, [when, "min", "max"])
            caption += ", with the band from the lowest to the highest"
        else:
            plot = draw(express.line, long, when, of, "where", tips=["what"], zero=zero)
            plot.update_traces(marker_size=6, line_width=1.5)
        means: Any = {"lowest mean": "min", "mean": "mean", "highest mean": "max"}
        numbers = long.groupby("where", sort=False)[of].agg(**means).reset_index()
        peaks = (name.removesuffix(ending) + f"max_{ending}" for name in measured)
        numbers["peak"] = [wide[name].max() if name in wide else math.nan for name in peaks]
        caption += f". From {long[of].min():,.0f} to {long[of].max():,.0f} {of}."
        found.append(figure(id, f"{title} over time", caption, plot, numbers, height=300))
    return found
