"""Where a run's wall time went, stage by stage: start, steps, evaluations, checkpoints, what lies between, and the end."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from service.report import labels as names
from service.report.figures import PHASE_COLOURS
from service.report.plotly_marks import BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION, Figure, flat_bars, flat_bars_layout
from service.report.run_records import Row
from service.runs.outcome import Outcome
from service.runs.result import RunResult, StageRow

COLOURS = {
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
    """What an epoch takes by the clock beside its steps; "" where no epoch was timed."""
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

    `main`: the entry on whose epochs the caption has a sentence.
    """
    known = [(label, entry.metrics, found) for label, entry in entries if (found := parts(entry))]
    if not known:
        return None
    words = [wall_time_sentence(known[main][1])]
    words += [_outside(run, sum(sum(found.values()) for _, _, found in known))] if run is not None else []
    table = [
        [label, *(names.number(found[part], 2) for part in COLOURS), names.number(sum(found.values()), 2)]
        for label, _, found in known
    ]
    return Figure(
        "wall",
        "Where the wall time goes",
        " ".join(filter(None, ["Seconds of each stage, from the launch of its workers to its result.", *words])),
        flat_bars([(label, sum(found.values()), found) for label, _, found in known], COLOURS, "s"),
        flat_bars_layout("s"),
        ["what", *(f"{part} s" for part in COLOURS), "together s"],
        table,
        height=160 + 60 * len(known),
    )


def stage_phases(stages: Sequence[StageRow]) -> Figure | None:
    """Where a step's time goes in each stage of a run."""
    timed = [stage for stage in stages if stage.metrics.get("phase/step_ms")]
    if not timed:
        return None
    wholes = []
    for stage in timed:
        phases_ms = {phase: stage.metrics.get(f"phase/{phase}_ms", 0.0) for phase in PHASE_COLOURS}
        wholes.append((stage.stage, stage.metrics["phase/step_ms"], phases_ms))
    parts = ("", "_min", "_p50", "_p95", "_max")
    table = [
        [stage.stage, phase, *(names.number(stage.metrics.get(f"phase/{phase}{part}_ms")) for part in parts)]
        for stage in timed
        for phase in (*PHASE_COLOURS, "step")
        if f"phase/{phase}_ms" in stage.metrics
    ]
    return Figure(
        "phases",
        "Where a step's time goes",
        "Mean milliseconds of a step, by phase.",
        flat_bars(wholes, PHASE_COLOURS, "ms"),
        flat_bars_layout("ms a step"),
        ["stage", "phase", "mean ms", "min", "p50", "p95", "max"],
        table,
        height=160 + 60 * len(timed),
    )


def _outside(run: RunResult, stages_s: float) -> str:
    """What a run that has ended took beyond its stages; "" where a session was killed before it could write its time down."""
    outside_s = run.seconds - stages_s
    if run.status == "running" or outside_s < 0:
        return ""
    return (
        f"The run took {names.short(run.seconds)} s; {names.short(outside_s)} s of them lie outside its stages, "
        "where Ray starts and records are written."
    )
