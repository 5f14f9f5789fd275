"""Where a run's wall time went, stage by stage: start, steps, evaluations, checkpoints, what lies between, and the end."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import pandas as pd
from plotly import express
from plotly.graph_objects import Figure as Plot

from service.report import labels as names
from service.report.charts import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION, Figure, draw, figure
from service.report.figures import PHASE_COLORS
from service.report.run_records import Row
from service.runs.outcome import Outcome
from service.runs.result import RunResult, StageRow

COLORS = {
    "start": GREY,
    "training": BLUE,
    "evaluation": GREEN,
    "checkpoints": ORANGE,
    "other": PURPLE,
    "end": SKY,
    "interruptions": VERMILION,
}

TOTALS = {"train_s", "eval_s", "checkpoint_s", "other_s", "wall_s"}


def parts(entry: Outcome) -> dict[str, float]:
    """Seconds of a stage or a trial by part, as `result.json` has it; {} where its clock is not on record.

    `start` is until the loop begins, `end` from its last record on. `interruptions` is what the driver waited beyond all
    that: restarts, and work that a death took with it.
    """
    m = entry.metrics
    if not m.keys() >= TOTALS:
        return {}
    found = {
        "start": entry.start_s or 0.0,
        "training": m["train_s"],
        "evaluation": m["eval_s"],
        "checkpoints": m["checkpoint_s"],
        "other": m["other_s"] + m.get("timing_s", 0.0),
        "end": entry.end_s or 0.0,
    }
    return found | {"interruptions": max(0.0, entry.seconds - sum(found.values()))}


def wall_time_sentence(metrics: Mapping[str, float]) -> str:
    """What an epoch takes by the clock, and its steps alone; "" where no epoch was timed."""
    if "epoch_wall_s" not in metrics or "epoch_s" not in metrics:
        return ""
    whole_s, steps_s = metrics["epoch_wall_s"], metrics["epoch_s"]
    return f"By the clock an epoch takes {names.short(whole_s)} s, its steps at the steady speed {names.short(steps_s)} s."


def of_trials(shown: Sequence[Row], rows: Sequence[Row]) -> Figure | None:
    """The parts of some trials, the best one first. `rows`: of all trials."""
    found = wall_time_figure([(f"trial {row.id}", row) for row in shown], None, main=0)
    if found is None:
        return None
    timed = {row.id for row in shown if parts(row)}
    highest = "accuracies" if any("top1_pct" in row.metrics for row in shown) else "speeds"
    return replace(found, caption=found.caption + names.left_out(rows, timed, f"one of the highest {highest}"))


def wall_time_figure(entries: Sequence[tuple[str, Outcome]], run: RunResult | None, main: int = -1) -> Figure | None:
    """The parts of each stage or trial; of a run that has ended, also what lies outside its stages.

    `main`: the entry whose epochs the caption describes.
    """
    known = {label: found for label, entry in entries if (found := parts(entry))}
    if not known:
        return None
    frame = pd.DataFrame(known).T.rename_axis("what")
    total_s = frame.sum(axis="columns")
    words = ["Seconds of each stage, from the launch of its workers to its result."]
    words.append(wall_time_sentence(dict(entries)[list(known)[main]].metrics))
    outside_s = run.seconds - total_s.sum() if run is not None else -1.0
    if run is not None and run.status != "running" and outside_s >= 0:  # a session that was killed left no time
        words.append(
            f"The run took {names.short(run.seconds)} s; {names.short(outside_s)} s of them lie outside its stages, "
            "where Ray starts and records are written."
        )
    plot, numbers = stacked(frame, "part", "s", COLORS), frame.add_suffix(" s").assign(**{"total s": total_s})
    return figure(
        "wall",
        "Where the wall time goes",
        " ".join(filter(None, words)),
        plot,
        numbers.reset_index(),
        height=160 + 60 * len(known),
    )


def stacked(frame: pd.DataFrame, part: str, unit: str, colors: Mapping[str, str]) -> Plot:
    """A horizontal bar for each row, its columns stacked; one that is nothing in all of them is left out."""
    long = frame.loc[:, (frame >= 0.001).any()].reset_index().melt("what", var_name=part, value_name=unit)
    long["share"] = (100 * long[unit] / long["what"].map(frame.sum(axis="columns"))).map("{:.0f}%".format)
    plot = draw(express.bar, long, unit, "what", part, colors=colors, tips=["share"], orientation="h")
    return plot.update_yaxes(autorange="reversed", title_text=None).update_layout(legend_traceorder="normal")


def stage_phases(stages: Sequence[StageRow]) -> Figure | None:
    """Where a step's time goes in each stage of a run."""
    timed = [stage for stage in stages if stage.metrics.get("phase/step_ms")]
    if not timed:
        return None
    frame = pd.DataFrame(
        {stage.stage: {phase: stage.metrics.get(f"phase/{phase}_ms", 0.0) for phase in PHASE_COLORS} for stage in timed}
    ).T.rename_axis("what")
    spread = {"mean ms": "", "min": "_min", "p50": "_p50", "p95": "_p95", "max": "_max"}
    numbers = [
        {"what": stage.stage, "phase": phase}
        | {name: stage.metrics.get(f"phase/{phase}{part}_ms", float("nan")) for name, part in spread.items()}
        for stage in timed
        for phase in (*PHASE_COLORS, "step")
        if f"phase/{phase}_ms" in stage.metrics
    ]
    return figure(
        "phases",
        "Where a step's time goes",
        "Mean milliseconds of a step, by phase.",
        stacked(frame, "phase", "ms/step", PHASE_COLORS),
        pd.DataFrame(numbers),
        height=160 + 60 * len(timed),
    )
