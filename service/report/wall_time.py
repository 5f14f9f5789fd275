"""Break down a run's wall time by stage: start, training, evaluation, checkpoints, other, end, interruptions."""

from collections.abc import Mapping

import pandas as pd
from plotly import express

from service.report import labels as names
from service.report.charts import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION, Figure, draw
from service.runs.outcome import Outcome
from service.runs.result import RunResult

PARTS = {"training": "train_s", "evaluation": "eval_s", "checkpoints": "checkpoint_s", "other": "other_s"}
COLORS = dict(zip(("start", *PARTS, "end", "interruptions"), (GREY, BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILION), strict=True))


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
    plot = draw(express.bar, long, "s", "what", "part", colors=COLORS, tips=["share"], orientation="h")
    plot.update_yaxes(autorange="reversed", title_text=None).update_layout(legend_traceorder="normal")
    numbers = frame.add_suffix(" s").assign(**{"total s": total_s}).reset_index()
    caption = f"Seconds of each stage, from the launch of its workers to its result.{caption}"
    return Figure("wall", "Where the wall time goes", caption, plot, numbers, height=160 + 60 * len(known))


def of_run(run: RunResult) -> Figure | None:
    """Plot the parts of a run's stages; once it has ended, the caption has the time outside them."""
    outside_s, caption = run.seconds - sum(sum(parts(stage).values()) for stage in run.stages), ""
    if run.status != "running" and outside_s >= 0:  # a killed session recorded no time
        caption = f" The run took {names.short(run.seconds)} s, including {names.short(outside_s)} s outside its stages, "
        caption += "to start Ray and write records."
    return wall_time({stage.stage: stage for stage in run.stages}, caption)
