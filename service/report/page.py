"""`report.html`: one page of a run directory, finished or not."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from importlib.metadata import version
from pathlib import Path

import pandas as pd

from service.config.space import GLOBAL_BATCH
from service.report import document, figures, seeds, tables, timeline, winner
from service.report import labels as names
from service.report import wall_time as wall
from service.report.charts import MAX_SERIES, Figure
from service.report.document import Page
from service.report.figures import BY_SPEED
from service.report.records import Records, Row, axes, hang_lines, ran, teacher_lines
from service.runs.outcome import Outcome
from service.search.rows import probes

RELOAD_S = 5
FACTS = (
    *("images_per_s", "epoch_s", "epoch_wall_s", "step_s", "data_pct", "top1_pct", "best_top1_pct", "linear_top1_pct", "cka"),
    *("cosine", "peak_memory_mib"),
)
"""The metrics in the header of the page."""
REACHED = ("top1_pct", "cka", "steps", "images_per_s")


def write_page(records: Records, path: Path | None = None) -> Path:
    """Write the page of a run atomically, and return its path. Raises ExperimentError if it cannot be written."""
    path = path or records.run_dir.report
    document.write(page_of(records), path)
    return path


def page_of(records: Records) -> Page:
    """Build the page of a sweep or a run; it reloads itself while the run is running."""
    page, result = sweep_page(records) if records.is_sweep else run_page(records), records.result
    when = f"{result.started} to {result.finished or 'now'}".replace("T", " ")
    reason = [result.reason] if result.reason else []
    return replace(
        page,
        notes=[*page.notes, *teacher_lines(result), *result.notes, *hang_lines(records.log), *reason],
        sections={**page.sections, "The experiment": [tables.settings(records)]},
        foot=f"raydistill {version('raydistill')} · {records.run_dir.root} · {when} · written {datetime.now():%Y-%m-%d %H:%M:%S}",
        refresh_s=RELOAD_S if result.status == "running" else None,
    )


def sweep_page(records: Records) -> Page:
    """Build the page of a sweep: the winner and why it won, the trials, speed over each axis, and all other measurements."""
    result, rows, best, unit = records.result, records.rows, records.best, records.result.unit
    points, front = probes(rows), result.search.front if result.search else ()  # training to a target is not a point of its own
    frame = figures.trial_frame(points, unit)
    precision = precision_note(best) if best else []
    return Page(
        "sweep",
        result.name,
        result.status,
        [*winner.lead(result, rows), *seeds.seeds_sentence(result)],
        [*precision, *winner.notes(result, rows)],
        {
            f"{unit[0].upper()}{unit[1:]}s × batch × loader workers": [tables.heat_table(records), tables.page_trials(records)],
            "Trials without a result": [tables.bad_trials(records)],
            "Over seeds": [seeds.seed_table(result), seeds.seeds_figure(result)],
            "Speed over each axis": [figures.over_axis(frame, points, best, key, unit) for key in axes(points) if best],
            "Where the time goes": [figures.phases(frame.rename(columns={"trial": BY_SPEED}), BY_SPEED), figures.waits(frame)],
            "Scaling and cost": [figures.efficiency(frame, best, unit) if best else None, figures.pareto(frame, unit, front)],
            "Accuracy and latency": [figures.accuracy_latency(frame, points)],
            "Over time": over_time(records),
        },
        facts_of(best.metrics) if best else {},
        winner.command(records.run_dir, records.log, best) if best else "",
    )


def run_page(records: Records) -> Page:
    """Build the page of a single run: what it reached, and where the time went."""
    result, histories = records.result, records.histories
    student = next((stage for stage in result.stages if stage.stage == "student" and stage.metrics), None)
    lead = [
        f"The {stage.stage} {stage.model}: {names.metrics_text(stage.metrics, REACHED) or f'{stage.status}: {stage.reason}'}."
        for stage in reversed(result.stages)
    ]
    if student and (shares := names.shares_text(student.metrics)):
        lead.insert(1, f"A step of the student: {shares}.")
    labels = list(histories)
    return Page(
        "run",
        result.name,
        result.status,
        lead or ["No stage is complete yet."],
        precision_note(student) if student else [],
        {
            "Learning": [timeline.losses(histories), timeline.accuracy(histories, labels)],
            "Where the time goes": [
                wall.of_run(result),
                figures.phases(stage_frame(records), "stage"),
                *timeline.over_steps(histories),
                *(tables.phase_table(stage.metrics, f"A step of the {stage.stage}") for stage in result.stages),
            ],
            "Hardware": timeline.hardware(histories),
        },
        facts_of(student.metrics) if student else {},
    )


def stage_frame(records: Records) -> pd.DataFrame:
    batch = records.experiment[GLOBAL_BATCH]
    return pd.DataFrame(
        [{"stage": stage.stage, "batch": batch, **figures.phase_ms(stage.metrics)} for stage in records.result.stages]
    )


def precision_note(outcome: Outcome) -> list[str]:
    """Say which precision `auto` chose, and why."""
    return [f"Precision auto: {outcome.precision}: {outcome.precision_reason}."] if outcome.precision_reason else []


def facts_of(metrics: Mapping[str, float]) -> dict[str, str]:
    """Format the metrics in FACTS for the header of the page."""
    return {
        names.label(name).head: names.metric_cell(metrics, name)
        for name in FACTS
        if name in metrics and not (name == "best_top1_pct" and metrics[name] == metrics.get("top1_pct"))
    }


def over_time(records: Records) -> list[Figure | None]:
    """Build the figures over time: accuracy and wall time of the best and the most accurate trials, and the hardware of all.

    If accuracies are equal or missing, the fastest trials take the place of the most accurate ones.
    """
    best, histories, rows = records.best, records.histories, records.rows

    def rank(row: Row) -> tuple[bool, float, float]:
        return best is None or row.id != best.id, -row.metrics.get("top1_pct", 0.0), -row.metrics["images_per_s"]

    trials = {f"trial {row.id}": row for row in sorted(ran(rows), key=rank)[:MAX_SERIES]}
    return [
        timeline.accuracy(histories, list(trials)),
        wall.wall_time(trials),
        *timeline.hardware(histories),
    ]
