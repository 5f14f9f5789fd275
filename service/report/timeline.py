"""Figures over time, as pure functions of what stages wrote while they ran: loss, accuracy, epochs, speed, waits."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from plotly import express
from plotly.graph_objects import Figure as Plot

from service.report import labels as names
from service.report.charts import GREY, MAX_SERIES, PALETTE, Figure, add_band, draw, escaped, figure
from service.report.run_records import History, Row

MAX_POINTS = 400  # of one line: more are not seen
MAX_FAINT = 60
MIN_EPOCHS = 3
ACCURACIES = {"val/top1_pct": ("Accuracy", "top-1 %"), "val/cka": ("Agreement with the teacher", "CKA")}


def recorded(histories: Sequence[History], kind: str, *metrics: str) -> pd.DataFrame:
    """The lines of one kind that have these metrics, all finite: `what` (the history), `epoch`, `at_s` since its start."""
    columns = ["what", "epoch", "at_s", *metrics]
    frame = pd.DataFrame(
        [
            (h.label, one["epoch"], (one["time_ms"] - h.start_ms) / 1e3, *(one["metrics"].get(name) for name in metrics))
            for h in histories
            for one in h.of(kind)
        ],
        columns=columns,
    )
    frame[columns[1:]] = frame[columns[1:]].apply(pd.to_numeric, errors="coerce")
    return frame.replace([np.inf, -np.inf], np.nan).dropna()


def downsampled(lines: pd.DataFrame) -> pd.DataFrame:
    """At most `MAX_POINTS` of each history, spread evenly, the last one among them."""
    if lines.empty:  # its columns have no types
        return lines
    back = lines.groupby("what").cumcount(ascending=False)
    steps = (lines["what"].value_counts() / MAX_POINTS).map(math.ceil)
    return lines[back % lines["what"].map(steps) == 0]


def clock(longest_s: float) -> tuple[str, float]:
    """The unit that suits the longest of several times, and its seconds."""
    return ("s", 1.0) if longest_s < 180 else ("min", 60.0) if longest_s < 10_800 else ("h", 3600.0)


def highlighted(frame: pd.DataFrame, chosen: Sequence[str], x: str, y: str, tips: Sequence[str] = ()) -> tuple[Plot, str]:
    """A line for each history, those `chosen` in color and others in the background, with words for the figure's caption.

    The n-th that was chosen has the n-th color, whether others are in this figure or not.
    """
    chosen = chosen[:MAX_SERIES]
    rest = [label for label in dict.fromkeys(frame["what"]) if label not in chosen]
    shown = frame[frame["what"].isin([*chosen, *rest[:MAX_FAINT]])]
    plot = draw(express.line, shown, x, y, "what", chosen, tips=tips, zero=False, markers=True)
    in_color = {escaped(label) for label in chosen}
    for trace in plot.data:
        if trace.name not in in_color:
            trace.update(mode="lines", opacity=0.5, showlegend=False, line={"color": GREY, "width": 1, "dash": "solid"})
    plot.data = sorted(plot.data, key=lambda trace: trace.name in in_color)  # faint ones behind the others
    caption = f" In color: the best and the most accurate; {len(rest[:MAX_FAINT])} others faint" if rest else ""
    caption += f", {len(rest) - MAX_FAINT} more in the numbers alone" if len(rest) > MAX_FAINT else ""
    return plot, f"{caption}." if caption else ""


def by_rank(frame: pd.DataFrame, chosen: Sequence[str]) -> pd.DataFrame:
    """The rows of those `chosen` in their order, then the others."""
    ranks = {label: rank for rank, label in enumerate(chosen)}
    return frame.sort_values("what", key=lambda labels: labels.map(ranks).fillna(len(ranks)), kind="stable")


def ids(frame: pd.DataFrame) -> set[str]:
    return {str(label).removeprefix("trial ") for label in frame["what"]}


def accuracy(histories: Sequence[History], chosen: Sequence[str], rows: Sequence[Row] = ()) -> Figure | None:
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
    plot, colors = highlighted(found, chosen, unit, text, ["epoch"])
    plot.update_xaxes(rangemode="tozero")
    each = found.groupby("what", sort=False)
    numbers = {
        "epochs": each["epoch"].last().map("{:g}".format),
        f"best {text}": each[text].max(),
        f"last {text}": each[text].last(),
    }
    return figure(
        "accuracy",
        f"{title} against wall time",
        f"Validation {text.removesuffix(' %')} at each epoch's end, by the time since the stage began."
        + colors
        + names.left_out(rows, ids(found), "an evaluated epoch"),
        plot,
        pd.DataFrame({**numbers, f"time {unit}": each[unit].last()}).reset_index(),
    )


def drift(histories: Sequence[History], chosen: Sequence[str], rows: Sequence[Row] = ()) -> Figure | None:
    """Whether epochs grow longer, as they do where a GPU gets hot. `chosen`, `rows`: as in `accuracy`."""
    found = by_rank(recorded(histories, "epoch", "epoch/train_s").rename(columns={"epoch/train_s": "s"}), chosen)
    found = found[found.groupby("what")["s"].transform("size") >= MIN_EPOCHS]
    if found.empty:
        return None
    plot, colors = highlighted(found, chosen, "epoch", "s")
    each: Any = found.groupby("what", sort=False)["s"]
    # The first epoch has the warm-up in it.
    numbers = pd.DataFrame({"first s": each.first(), "second s": each.nth(1).set_axis(each.first().index), "last s": each.last()})
    change = numbers["last s"] / numbers["second s"] - 1
    words = [
        f"{label} {names.short(one['second s'])} → {names.short(one['last s'])} s ({one['change']:+.0%})"
        for label, one in numbers.assign(change=change).iloc[:3].iterrows()
    ]
    return figure(
        "drift",
        "Steps of each epoch",
        f"Seconds of training, without evaluation and checkpoints. From the second to the last: {'; '.join(words)}.{colors}"
        + names.left_out(rows, ids(found), f"{MIN_EPOCHS} whole epochs"),
        plot,
        numbers.assign(**{"second to last": change.map("{:+.1%}".format)}).reset_index(),
    )


def losses_figure(histories: Sequence[History]) -> Figure | None:
    """Training loss at the log lines, validation loss at the epochs' ends."""
    steps = downsampled(recorded(histories, "step", "train/loss")).rename(columns={"train/loss": "loss"})
    epochs = recorded(histories, "epoch", "val/loss").rename(columns={"val/loss": "loss"})
    if steps.empty and epochs.empty:
        return None
    labels = [h.label for h in histories]
    plot = draw(express.line, steps, "epoch", "loss", "what", labels, zero=False, markers=False)
    plot.for_each_trace(lambda trace: trace.update(name=f"{trace.name}, training"))
    validated = draw(express.scatter, epochs, "epoch", "loss", "what", labels)
    validated.for_each_trace(lambda trace: trace.update(name=f"{trace.name}, validation"))
    plot.add_traces(validated.data)
    training = recorded(histories, "epoch", "epoch/train/loss")
    return figure(
        "loss",
        "Loss",
        "Lines are the training loss at its log lines, marks the validation loss at each epoch's end.",
        plot,
        epochs.merge(training, how="left", on=["what", "epoch"])
        .assign(epoch=lambda frame: frame["epoch"].map("{:g}".format))
        .rename(columns={"loss": "validation", "epoch/train/loss": "training"})[["what", "epoch", "training", "validation"]],
        {"training": 4, "validation": 4},
    )


def speeds(histories: Sequence[History]) -> Figure | None:
    caption = "Images trained on per second between log lines, over all workers."
    return over_steps(histories, "speed", "Speed over time", "images/s", caption, "train/images_per_s")


def waits_over_time(histories: Sequence[History]) -> Figure | None:
    """How long a step waits for data, with the shortest and the longest wait between log lines."""
    caption = "Milliseconds that a step of rank 0 waits for images: the mean, and the span between log lines."
    parts = [f"train/phase/data{part}_ms" for part in ("", "_min", "_max")]
    return over_steps(histories, "waits", "Data wait, min to max", "ms/step", caption, *parts)


def over_steps(
    histories: Sequence[History], id: str, title: str, unit: str, caption: str, metric: str, *span: str
) -> Figure | None:
    """A metric at the log lines; `span`: those of its lower and upper end."""
    found = downsampled(recorded(histories, "step", metric)).rename(columns={metric: unit})
    if found.empty:
        return None
    labels = [h.label for h in histories]
    plot = draw(express.line, found, "epoch", unit, "what", labels, markers=False)
    for label, part in recorded(histories, "step", *span).groupby("what") if span else ():
        part = downsampled(part)
        color = PALETTE[labels.index(str(label)) % MAX_SERIES]
        add_band(plot, color, part["epoch"].tolist(), part[span[0]].tolist(), part[span[1]].tolist(), str(label))
    numbers: Any = {"min": "min", "median": "median", "max": "max", "last": "last"}
    return figure(id, title, caption, plot, found.groupby("what", sort=False)[unit].agg(**numbers).reset_index())
