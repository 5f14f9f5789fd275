"""Figures over time, as pure functions of what the stages recorded: loss, accuracy, speed, data waits, hardware, wall time."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from plotly import express

from service.report import labels as names
from service.report.charts import BLUE, GREEN, GREY, MAX_SERIES, ORANGE, PALETTE, PURPLE, SKY, VERMILION, Figure, add_band, draw
from service.report.records import Histories
from service.runs.outcome import Outcome
from service.runs.result import RunResult
from trainables.rundir import final_names

MAX_POINTS = 400  # per line: more are not visible
ACCURACIES = {"val/top1_pct": ("Accuracy", "top-1 %"), "val/cka": ("Agreement with the teacher", "CKA")}
HARDWARE = (
    ("utilization", "GPU utilization", r"gpu\d+/util", "pct", "%", True),
    ("temperature", "GPU temperature", r"gpu\d+/temperature", "c", "°C", False),
    ("clocks", "GPU clocks (SM)", r"gpu\d+/sm_clock", "mhz", "MHz", False),
    ("cpu", "CPU use of the nodes", "cpu", "pct", "%", True),
)
"""Figure, title, metric of a node, the metric's unit suffix, the unit shown, and whether the axis starts at zero."""
PARTS = {"training": "train_s", "evaluation": "eval_s", "checkpoints": "checkpoint_s", "other": "other_s"}
PART_COLORS = dict(
    zip(("start", *PARTS, "end", "interruptions"), (GREY, BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILION), strict=True)
)


def recorded(histories: Histories, kind: str, *metrics: str) -> pd.DataFrame:
    """Return the events of a kind with finite `metrics`, the stage (`what`), `epoch`, and `at_s` since the stage began."""
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
    """Keep at most `MAX_POINTS` evenly spaced events per stage, including the last."""
    each = lines.groupby("what")
    is_shown: pd.Series = each.cumcount(ascending=False) % np.ceil(each["what"].transform("size") / MAX_POINTS) == 0
    return lines[is_shown]


def clock(longest_s: float) -> tuple[str, float]:
    """Return a suitable unit for times up to `longest_s`, and its length in seconds."""
    return ("s", 1.0) if longest_s < 180 else ("min", 60.0) if longest_s < 10_800 else ("h", 3600.0)


def accuracy(histories: Histories, chosen: Sequence[str]) -> Figure | None:
    """Plot validation accuracy, or else agreement with the teacher, over wall time for the `chosen` labels."""
    frames = {metric: recorded(histories, "epoch", metric) for metric in ACCURACIES}
    metric = next((metric for metric, frame in frames.items() if len(frame)), "")
    if not metric:
        return None
    found, (title, text) = frames[metric], ACCURACIES[metric]
    unit, factor = clock(found["at_s"].max())
    found = found.rename(columns={metric: text}).assign(**{unit: found["at_s"] / factor})
    drawn, count = found[found["what"].isin(list(chosen))], found["what"].nunique()
    plot = draw(express.line, drawn, unit, text, "what", chosen, tips=["epoch"], zero=False).update_xaxes(rangemode="tozero")
    caption = f"Validation {text.removesuffix(' %')} at the end of each epoch, over the time since the stage began."
    caption += f" Of {count}: the best and the most accurate." if count > len(chosen) else ""
    parts: Any = {"epochs": ("epoch", "last"), f"best {text}": (text, "max"), f"last {text}": (text, "last")}
    numbers = found.groupby("what", sort=False).agg(**parts, **{f"time {unit}": (unit, "last")}).reset_index()
    return Figure("accuracy", f"{title} against wall time", caption, plot, numbers)


def losses(histories: Histories) -> Figure | None:
    """Plot the training loss at log lines, and the validation loss at the end of each epoch."""
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
    caption = "Lines are the training loss at log lines, markers the validation loss at the end of each epoch."
    return Figure("loss", "Loss", caption, plot, numbers[["what", "epoch", "training", "validation"]])


def waits(histories: Histories) -> Figure | None:
    """Plot how long steps wait for data, with a band from the shortest to the longest wait."""
    caption = "Milliseconds that a step of rank 0 waits for images: the mean, and the span between log lines."
    span = ["train/phase/data_min_ms", "train/phase/data_max_ms"]
    return over_steps(histories, "waits", "Data wait, min to max", caption, "train/phase/data_ms", "ms/step", span)


def speed(histories: Histories) -> Figure | None:
    caption = "Images trained on per second between log lines, over all workers."
    return over_steps(histories, "speed", "Speed over time", caption, "train/images_per_s", "images/s")


def over_steps(
    histories: Histories, id: str, title: str, caption: str, metric: str, unit: str, span: Sequence[str] = ()
) -> Figure | None:
    """Plot a metric at the log lines, with a band between the two metrics of its `span`."""
    labels, lines = list(histories), downsampled(recorded(histories, "step", metric, *span)).rename(columns={metric: unit})
    if lines.empty:
        return None
    plot = draw(express.line, lines, "epoch", unit, "what", labels, markers=False)
    for label, part in lines.groupby("what") if span else ():
        add_band(plot, PALETTE[labels.index(str(label)) % MAX_SERIES], part, ["epoch", *span], str(label))
    numbers = lines.groupby("what", sort=False)[unit].agg(["min", "median", "max", "last"]).reset_index()
    return Figure(id, title, caption, plot, numbers)


def hardware(histories: Histories) -> list[Figure]:
    """Plot the telemetry of GPUs and nodes, with a point per epoch, or per trial if it only timed steps."""
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
        many = len(series) > MAX_SERIES
        plot = draw(express.line, long, when, of, "where", tips=["what"], markers=not many, zero=zero)
        plot.update_traces(marker_size=6, line_width=1.5, showlegend=not many)
        means: Any = {"lowest mean": "min", "mean": "mean", "highest mean": "max"}
        numbers = long.groupby("where", sort=False)[of].agg(**means).reset_index()
        peaks = (name.removesuffix(ending) + f"max_{ending}" for name in measured)
        numbers["peak"] = [wide[name].max() if name in wide else math.nan for name in peaks]
        caption = f"Means of each epoch or trial. From {long[of].min():,.0f} to {long[of].max():,.0f} {of}."
        found.append(Figure(id, f"{title} over time", caption, plot, numbers, height=300))
    return found


def parts(entry: Outcome) -> dict[str, float]:
    """Return the seconds of a stage or trial by part; {} if they were not recorded.

    `start` lasts until the loop begins, `end` from its last record on. `interruptions` is the rest of the driver's wait:
    restarts, and work lost to crashes.
    """
    m = entry.metrics
    if "train_s" not in m:
        return {}
    found = {"start": entry.start_s or 0.0, **{part: m[name] for part, name in PARTS.items()}, "end": entry.end_s or 0.0}
    found["other"] += m.get("timing_s", 0.0)
    return found | {"interruptions": max(0.0, entry.seconds - sum(found.values()))}


def wall_time(entries: Mapping[str, Outcome], caption: str = "") -> Figure | None:
    """Plot the parts of stages or trials, by their labels."""
    known = {label: found for label, entry in entries.items() if (found := parts(entry))}
    if not known:
        return None
    frame = pd.DataFrame(known).T.rename_axis("what")
    total_s = frame.sum(axis="columns")
    long = frame.loc[:, (frame >= 0.001).any()].reset_index().melt("what", var_name="part", value_name="s")
    long["share"] = (long["s"] / long["what"].map(total_s)).map("{:.0%}".format)
    plot = draw(express.bar, long, "s", "what", "part", colors=PART_COLORS, tips=["share"], orientation="h")
    plot.update_yaxes(autorange="reversed", title_text=None).update_layout(legend_traceorder="normal")
    numbers = frame.add_suffix(" s").assign(**{"total s": total_s}).reset_index()
    caption = f"Seconds of each stage, from the launch of its workers to its result.{caption}"
    return Figure("wall", "Where the wall time goes", caption, plot, numbers, height=160 + 60 * len(known))


def wall_time_of_run(run: RunResult) -> Figure | None:
    """Plot the parts of a run's stages; once it has ended, the caption has the time outside them."""
    outside_s, caption = run.seconds - sum(sum(parts(stage).values()) for stage in run.stages), ""
    if run.status != "running" and outside_s >= 0:  # a killed session recorded no time
        caption = f" The run took {names.short(run.seconds)} s, including {names.short(outside_s)} s outside its stages, "
        caption += "to start Ray and write records."
    return wall_time({stage.stage: stage for stage in run.stages}, caption)
