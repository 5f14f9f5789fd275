"""`report.html`: one page of a run directory, finished or not."""

from datetime import datetime
from importlib.metadata import version
from pathlib import Path

import pandas as pd

from service.config.space import GLOBAL_BATCH
from service.report import document, figures, seeds, tables, timeline, winner
from service.report import labels as names
from service.report.charts import MAX_SERIES, Figure
from service.report.document import Page, Sections
from service.report.records import Records, axes, by_speed, hang_lines, ran, teacher_lines
from service.runs.result import RunResult, TrialRow
from service.search.rows import probes

RELOAD_S = 5
FACTS = (
    *("images_per_s", "epoch_s", "epoch_wall_s", "step_s", "data_pct", "top1_pct", "linear_top1_pct", "cka", "cosine"),
    "peak_memory_mib",
)
"""The metrics in the header of the page."""
REACHED = ("top1_pct", "cka", "steps", "images_per_s")
BAD = ("failed", "oom", "infeasible", "stopped")
BY_SPEED = "trial, fastest first"


def write_page(records: Records, path: Path | None = None) -> Path:
    """Write the page of a run atomically, and return its path. Raises ExperimentError if it cannot be written."""
    path = path or records.run_dir.report
    document.write(page_of(records), path)
    return path


def page_of(records: Records) -> Page:
    """Build the page of a sweep or a run; it reloads itself while the run is running."""
    result, best, is_sweep = records.result, records.best, records.is_sweep
    when = f"{result.started} to {result.finished or 'now'}".replace("T", " ")
    notes = [*teacher_lines(result), *result.notes, *hang_lines(records.log), *([result.reason] if result.reason else [])]
    if is_sweep:
        notes = [*winner.notes(result), *notes]
    if best and best.precision_reason:
        notes.insert(0, f"Precision auto: {best.precision}: {best.precision_reason}.")
    return Page(
        kind="sweep" if is_sweep else "run",
        title=result.name,
        status=result.status,
        lead=[*winner.lead(result), *seeds.seeds_sentence(result)] if is_sweep else run_lead(result),
        notes=notes,
        sections={
            **(sweep_sections(records) if is_sweep else run_sections(records)),
            "The experiment": [tables.settings(records)],
        },
        facts={names.label(name).head: names.metric_cell(best.metrics, name) for name in FACTS if best and name in best.metrics},
        command=winner.command(records.run_dir, records.log, best) if is_sweep and best else "",
        foot=f"raydistill {version('raydistill')} · {records.run_dir.root} · {when} · written {datetime.now():%Y-%m-%d %H:%M:%S}",
        refresh_s=RELOAD_S if result.status == "running" else None,
    )


def sweep_sections(records: Records) -> Sections:
    """Build the trials of a sweep, their speed over each axis, and all other measurements."""
    result, best, unit = records.result, records.best, records.result.unit
    tried = [row for row in records.rows if row.status != "untested"]
    bad = [row for row in records.rows if row.status in BAD]
    points = probes(records.rows)  # training to a target is not a point of its own
    sections: Sections = {
        f"{unit[0].upper()}{unit[1:]}s × batch × loader workers": [
            tables.heat_table(records),
            tables.trial_table(result, tried, f"All {names.counted(len(tried), 'trial')}"),
        ],
        "Trials without a result": [tables.trial_table(result, bad, f"{names.counted(len(bad), 'trial')} and their reasons")],
        "Over seeds": [seeds.seed_table(result), seeds.seeds_figure(result)],
    }
    if best and (measured := by_speed(points)):
        frame = tables.trial_frame(result, measured)
        keys, front = axes(measured), result.search.front if result.search else ()
        sections |= {
            "Speed over each axis": [figures.over_axis(frame, keys, key, unit) for key in keys],
            "Where the time goes": [
                tables.phase_table(best.metrics, f"A step of trial {best.id}"),
                figures.phases(frame.rename(columns={"trial": BY_SPEED}), BY_SPEED),
            ],
            "Scaling and cost": [figures.efficiency(frame, best, unit), figures.pareto(frame, unit, front)],
            "Accuracy and latency": [figures.accuracy_latency(frame)],
        }
    return {**sections, "Over time": over_time(records)}


def run_lead(result: RunResult) -> list[str]:
    """Say what each stage of a run reached, the last one first, and where a step of the student goes."""
    sentences = [
        f"The {stage.stage} {stage.model}: {names.metrics_text(stage.metrics, REACHED) or f'{stage.status}: {stage.reason}'}."
        for stage in reversed(result.stages)
    ]
    student = next((stage for stage in result.stages if stage.stage == "student"), None)
    if student and (shares := names.shares_text(student.metrics)):
        sentences.insert(1, f"A step of the student: {shares}.")
    return sentences or ["No stage is complete yet."]


def run_sections(records: Records) -> Sections:
    """Build what a run learned, and where its time went."""
    result, histories = records.result, records.histories
    batch = records.experiment[GLOBAL_BATCH]
    steps = [{"stage": stage.stage, "batch": batch, **tables.phase_ms(stage.metrics)} for stage in result.stages]
    return {
        "Learning": [timeline.losses(histories), timeline.accuracy(histories, list(histories))],
        "Where the time goes": [
            timeline.wall_time_of_run(result),
            figures.phases(pd.DataFrame(steps), "stage") if steps else None,
            timeline.waits(histories),
            timeline.speed(histories),
            *(tables.phase_table(stage.metrics, f"A step of the {stage.stage}") for stage in result.stages),
        ],
        "Hardware": timeline.hardware(histories),
    }


def over_time(records: Records) -> list[Figure | None]:
    """Build the figures over time: accuracy and wall time of the best and the most accurate trials, and the hardware of all.

    If accuracies are equal or missing, the fastest trials take the place of the most accurate ones.
    """
    best, histories = records.best, records.histories

    def rank(row: TrialRow) -> tuple[bool, float, float]:
        return best is None or row.id != best.id, -row.metrics.get("top1_pct", 0.0), -row.metrics["images_per_s"]

    trials = {f"trial {row.id}": row for row in sorted(ran(records.rows), key=rank)[:MAX_SERIES]}
    return [timeline.accuracy(histories, list(trials)), timeline.wall_time(trials), *timeline.hardware(histories)]
