"""Figures over time, as pure functions of what stages wrote while they ran: loss, accuracy, epochs, speed, waits."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from service.report import labels as names
from service.report.plotly_marks import GREY, MOST_SERIES, PALETTE, Figure, Trace, band, dots, hover, joined_dots, line, y_axis
from service.report.run_records import History, Row

MOST_POINTS = 400  # of one line: more are not seen
MOST_FAINT = 60
FEWEST_EPOCHS = 3


def thin(lines: Sequence[Any]) -> list[Any]:
    """At most `MOST_POINTS`, spread evenly, the last one kept."""
    step = max(1, math.ceil(len(lines) / MOST_POINTS))
    return [*lines[::-1][::step]][::-1]


def clock(longest_s: float) -> tuple[str, float]:
    """The unit that suits the longest of several times, and its seconds."""
    return ("s", 1.0) if longest_s < 180 else ("min", 60.0) if longest_s < 10_800 else ("h", 3600.0)


def since(history: History, record: Mapping[str, Any]) -> float:
    """Seconds from the stage's start to one of its lines."""
    return float((record["time_ms"] - history.start_ms) / 1e3)


def in_color(histories: Sequence[History], chosen: Sequence[str]) -> tuple[list[tuple[int | None, History]], str]:
    """What a figure draws, the faint ones first, each with its index among the `chosen` labels; and words for its caption.

    The index counts all that were chosen, in this figure or not: it gives a label the same color in every figure.
    """
    indices = {label: index for index, label in enumerate(chosen[:MOST_SERIES])}
    first = sorted((h for h in histories if h.label in indices), key=lambda h: indices[h.label])
    rest = [h for h in histories if h.label not in indices]
    caption = f" In color: the best and the most accurate; {len(rest[:MOST_FAINT])} others faint" if rest else ""
    caption += f", {len(rest) - MOST_FAINT} more in the numbers alone" if len(rest) > MOST_FAINT else ""
    drawn = [*((None, h) for h in rest[:MOST_FAINT]), *((indices[h.label], h) for h in first)]
    return drawn, f"{caption}." if caption else ""


def by_rank(histories: Sequence[History], chosen: Sequence[str]) -> list[History]:
    """Those `chosen` in their order, then the others."""
    return sorted(histories, key=lambda h: chosen.index(h.label) if h.label in chosen else len(chosen))


def trial_of(history: History) -> str:
    return history.label.removeprefix("trial ")


def history_line(index: int | None, label: str, xs: Sequence[float], ys: Sequence[float], tips: Sequence[str]) -> Trace:
    """One history's line, in the color of its index or, without one, in the background."""
    if index is None:
        return line(label, 0, xs, ys, hovertext=tips, hoverinfo="text", opacity=0.5, showlegend=False) | {
            "line": {"color": GREY, "width": 1}
        }
    return joined_dots(label, index, xs, ys, tips)


def accuracy(histories: Sequence[History], chosen: Sequence[str], rows: Sequence[Row] = ()) -> Figure | None:
    """Validation accuracy against wall time, or without any the agreement with the teacher.

    Those `chosen` by their label are in color, others in the background.

    `rows`: of a sweep, all its trials.
    """
    name, title, text = "val/top1_pct", "Accuracy against wall time", "top-1 %"
    if not any(name in one["metrics"] for h in histories for one in h.of("epoch")):
        name, title, text = "val/cka", "Agreement with the teacher against wall time", "CKA"
    epochs = {h.label: [one for one in h.of("epoch") if name in one["metrics"]] for h in histories}
    evaluated = by_rank([h for h in histories if epochs[h.label]], chosen)
    if not evaluated:
        return None
    unit, factor = clock(max(since(h, one) for h in evaluated for one in h.of("epoch")))
    drawn, colors = in_color(evaluated, chosen)
    times = {h.label: [since(h, one) / factor for one in epochs[h.label]] for h in evaluated}
    values = {h.label: [one["metrics"][name] for one in epochs[h.label]] for h in evaluated}
    traces: list[Trace] = []
    for index, h in drawn:
        xs, ys = times[h.label], values[h.label]
        tips = [
            hover(h.label, f"epoch {one['epoch']:g}", f"{text} {y:.4g}", f"after {x:.3g} {unit}")
            for one, x, y in zip(epochs[h.label], xs, ys, strict=True)
        ]
        traces.append(history_line(index, h.label, xs, ys, tips))
    table = []
    for h in evaluated:
        last, ys = epochs[h.label][-1], values[h.label]
        took = f"{times[h.label][-1]:.3g} {unit}"
        table.append([h.label, f"{last['epoch']:g}", names.number(max(ys)), names.number(ys[-1]), took])
    caption = f"Validation {text.removesuffix(' %')} at each epoch's end, by the time since the stage began." + colors
    caption += names.left_out(rows, {trial_of(h) for h in evaluated}, "an evaluated epoch")
    return Figure(
        "accuracy",
        title,
        caption,
        traces,
        {"xaxis": {"title": {"text": unit}, "rangemode": "tozero"}, "yaxis": y_axis(text, zero=False)},
        ["what", "epochs", f"best {text}", f"last {text}", "time"],
        table,
    )


def epoch_times(history: History) -> list[tuple[float, float]]:
    """(epoch, seconds of its steps) of each epoch whose clock is on record."""
    return [(float(one["epoch"]), one["metrics"]["epoch/train_s"]) for one in history.of("epoch") if finite(one, "epoch/train_s")]


def drift(histories: Sequence[History], chosen: Sequence[str], rows: Sequence[Row] = ()) -> Figure | None:
    """Whether epochs grow longer, as they do where a GPU gets hot. `chosen`, `rows`: as in `accuracy`."""
    times = {h.label: epochs for h in histories if len(epochs := epoch_times(h)) >= FEWEST_EPOCHS}
    timed = by_rank([h for h in histories if h.label in times], chosen)
    if not timed:
        return None
    drawn, colors = in_color(timed, chosen)
    traces, table, words = [], [], []
    for index, h in drawn:
        xs, ys = [epoch for epoch, _ in times[h.label]], [seconds for _, seconds in times[h.label]]
        tips = [hover(h.label, f"epoch {x:g}", f"{y:.2f} s") for x, y in times[h.label]]
        traces.append(history_line(index, h.label, xs, ys, tips))
    for h in timed:
        ys = [seconds for _, seconds in times[h.label]]
        # The first epoch has the warm-up in it.
        change = ys[-1] / ys[1] - 1
        words.append(f"{h.label} {names.short(ys[1])} → {names.short(ys[-1])} s ({change:+.0%})")
        table.append([h.label, names.number(ys[0]), names.number(ys[1]), names.number(ys[-1]), f"{change:+.1%}"])
    return Figure(
        "drift",
        "Steps of each epoch",
        f"Seconds of training, without evaluation and checkpoints. From the second to the last: {'; '.join(words[:3])}.{colors}"
        + names.left_out(rows, {trial_of(h) for h in timed}, f"{FEWEST_EPOCHS} whole epochs"),
        traces,
        {"xaxis": {"title": {"text": "epoch"}}, "yaxis": y_axis("s", zero=False)},
        ["what", "first s", "second s", "last s", "second to last"],
        table,
    )


def losses_figure(histories: Sequence[History]) -> Figure | None:
    """Training loss at the log lines, validation loss at the epochs' ends."""
    traces, table = [], []
    for index, h in enumerate(histories):
        steps, epochs = thin([one for one in h.of("step") if finite(one, "train/loss")]), h.of("epoch")
        if steps:
            ys = [one["metrics"]["train/loss"] for one in steps]
            traces.append(line(f"{h.label}, training", index, [one["epoch"] for one in steps], ys))
        validated = [one for one in epochs if finite(one, "val/loss")]
        if validated:
            ys = [one["metrics"]["val/loss"] for one in validated]
            tips = [
                hover(h.label, f"epoch {one['epoch']:g}", f"validation loss {y:.4f}")
                for one, y in zip(validated, ys, strict=True)
            ]
            traces.append(dots(f"{h.label}, validation", index, [one["epoch"] for one in validated], ys, tips))
            table += [
                [h.label, f"{one['epoch']:g}", names.number(one["metrics"].get("epoch/train/loss"), 4), names.number(y, 4)]
                for one, y in zip(validated, ys, strict=True)
            ]
    if not traces:
        return None
    return Figure(
        "loss",
        "Loss",
        "Lines are the training's loss at its log lines, marks the validation's at each epoch's end.",
        traces,
        {"xaxis": {"title": {"text": "epoch"}}, "yaxis": y_axis("loss", zero=False)},
        ["stage", "epoch", "training", "validation"],
        table,
    )


def finite(record: Mapping[str, Any], name: str) -> bool:
    value = record["metrics"].get(name)
    return isinstance(value, int | float) and math.isfinite(value)


def speeds(histories: Sequence[History]) -> Figure | None:
    return over_steps(
        histories,
        "speed",
        "Speed over time",
        "train/images_per_s",
        "images/s",
        "Images trained on per second between log lines, over all workers.",
    )


def waits_over_time(histories: Sequence[History]) -> Figure | None:
    """What a step waits for data, with the least and the most between log lines."""
    return over_steps(
        histories,
        "waits",
        "The wait for data, least to most",
        "train/phase/data_ms",
        "ms a step",
        "Milliseconds that a step of rank 0 waits for images: the mean, and the span between log lines.",
        ("train/phase/data_min_ms", "train/phase/data_max_ms"),
    )


def over_steps(
    histories: Sequence[History], name: str, title: str, metric: str, unit: str, caption: str, span: tuple[str, str] | None = None
) -> Figure | None:
    traces, table = [], []
    for index, h in enumerate(histories):
        steps = thin([one for one in h.of("step") if finite(one, metric)])
        if not steps:
            continue
        xs, ys = [one["epoch"] for one in steps], [one["metrics"][metric] for one in steps]
        if span and all(finite(one, part) for one in steps for part in span):
            low, high = ([one["metrics"][part] for one in steps] for part in span)
            traces.append(band(PALETTE[index % MOST_SERIES], xs, low, high, h.label))
        traces.append(line(h.label, index, xs, ys, legendgroup=h.label))
        table.append([h.label, *(names.number(one, 2) for one in (min(ys), statistics.median_high(ys), max(ys), ys[-1]))])
    if not traces:
        return None
    return Figure(
        name,
        title,
        caption,
        traces,
        {"xaxis": {"title": {"text": "epoch"}}, "yaxis": y_axis(unit)},
        ["stage", "least", "median", "most", "last"],
        table,
    )
