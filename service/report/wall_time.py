"""Where a run's wall time went, stage by stage: start, steps, evaluations, checkpoints, what lies between, and the end."""

from collections.abc import Mapping, Sequence

import pandas as pd
from plotly import express
from plotly.graph_objects import Figure as Plot

from service.report import labels as names
from service.report.charts import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION, Figure, draw, figure
from service.report.figures import PHASE_COLORS
from service.report.records import Row
from service.runs.outcome import Outcome
from service.runs.result import RunResult, StageRow

PARTS = {"training": "train_s", "evaluation": "eval_s", "checkpoints": "checkpoint_s", "other": "other_s"}
COLORS = dict(zip(("start", *PARTS, "end", "interruptions"), (GREY, BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILION), strict=True))
PHASE_SPREAD = {"mean ms": "", "min": "_min", "p50": "_p50", "p95": "_p95", "max": "_max"}


def parts(entry: Outcome) -> dict[str, float]:
    """Seconds of a stage or a trial by part, as `result.json` has it; {} where its clock is not on record.

    `start` is until the loop begins, `end` from its last record on. `interruptions` is what the driver waited beyond all
    that: restarts, and work that a death took with it.
    """
    m = entry.metrics
    if not m.keys() >= {*PARTS.values(), "wall_s"}:
        return {}
    found = {"start": entry.start_s or 0.0, **{part: m[name] for part, name in PARTS.items()}, "end": entry.end_s or 0.0}
    found["other"] += m.get("timing_s", 0.0)
    return found | {"interruptions": max(0.0, entry.seconds - sum(found.values()))}


def of_run(run: RunResult) -> Figure | None:
    """The parts of each stage, and of a run that has ended what lies outside its stages."""
    known = {stage.stage: found for stage in run.stages if (found := parts(stage))}
    outside_s = run.seconds - sum(map(sum, (found.values() for found in known.values())))
    if run.status == "running" or outside_s < 0:  # a session that was killed left no time
        return wall_time(known, "")
    return wall_time(
        known,
        f" The run took {names.short(run.seconds)} s; {names.short(outside_s)} s of them lie outside its stages, where Ray "
        "starts and records are written.",
    )


def of_trials(shown: Sequence[Row], rows: Sequence[Row]) -> Figure | None:
    """The parts of some trials, the best one first. `rows`: of all trials."""
    known = {row.id: found for row in shown if (found := parts(row))}
    highest = "accuracies" if any("top1_pct" in row.metrics for row in shown) else "speeds"
    missing = names.left_out(rows, known, f"one of the highest {highest}")
    return wall_time({f"trial {id}": found for id, found in known.items()}, missing)


def wall_time(known: Mapping[str, Mapping[str, float]], caption: str) -> Figure | None:
    if not known:
        return None
    frame = pd.DataFrame(known).T.rename_axis("what")
    return figure(
        "wall",
        "Where the wall time goes",
        f"Seconds of each stage, from the launch of its workers to its result.{caption}",
        stacked(frame, "part", "s", COLORS),
        frame.add_suffix(" s").assign(**{"total s": frame.sum(axis="columns")}).reset_index(),
        height=160 + 60 * len(known),
    )


def stage_phases(stages: Sequence[StageRow]) -> Figure | None:
    """Where a step's time goes in each stage of a run."""
    numbers = pd.DataFrame(
        {"what": stage.stage, "phase": phase}
        | {name: stage.metrics.get(f"phase/{phase}{part}_ms") for name, part in PHASE_SPREAD.items()}
        for stage in stages
        for phase in (*PHASE_COLORS, "step")
        if f"phase/{phase}_ms" in stage.metrics
    )
    if numbers.empty:
        return None
    frame = numbers[numbers["phase"] != "step"].pivot_table(index="what", columns="phase", values="mean ms", sort=False)
    return figure(
        "phases",
        "Where a step's time goes",
        "Mean milliseconds of a step, by phase.",
        stacked(frame, "phase", "ms/step", PHASE_COLORS),
        numbers,
        height=160 + 60 * len(frame),
    )


def stacked(frame: pd.DataFrame, part: str, unit: str, colors: Mapping[str, str]) -> Plot:
    """A horizontal bar for each row, its columns stacked; one that is nothing in all of them is left out."""
    long = frame.loc[:, (frame >= 0.001).any()].reset_index().melt("what", var_name=part, value_name=unit)
    long["share"] = (100 * long[unit] / long["what"].map(frame.sum(axis="columns"))).map("{:.0f}%".format)
    plot = draw(express.bar, long, unit, "what", part, colors=colors, tips=["share"], orientation="h")
    return plot.update_yaxes(autorange="reversed", title_text=None).update_layout(legend_traceorder="normal")
