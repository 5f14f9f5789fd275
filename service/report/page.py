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
from service.report.charts import MAX_SERIES, Figure
from service.report.document import Page
from service.report.records import Records, axes, by_speed, hang_lines, ran, teacher_lines
from service.runs.outcome import Outcome
from service.runs.result import TrialRow
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
    result, best, unit = records.result, records.best, records.result.unit
    tried = [row for row in records.rows if row.status != "untested"]
    bad = [row for row in records.rows if row.status in BAD]
    points = probes(records.rows)  # training to a target is not a point of its own
    return Page(
        "sweep",
        result.name,
        result.status,
        [*winner.lead(result), *seeds.seeds_sentence(result)],
        [*(precision_note(best) if best else []), *winner.notes(result)],
        {
            f"{unit[0].upper()}{unit[1:]}s × batch × loader workers": [
                tables.heat_table(records),
                tables.trial_table(result, tried, f"All {names.counted(len(tried), 'trial')}"),
            ],
            "Trials without a result": [tables.trial_table(result, bad, f"{names.counted(len(bad), 'trial')} and their reasons")],
            "Over seeds": [seeds.seed_table(result), seeds.seeds_figure(result)],
            **(speed_figures(records, points, best) if best and ran(points) else {}),
            "Over time": over_time(records),
        },
        facts_of(best.metrics) if best else {},
        winner.command(records.run_dir, records.log, best) if best else "",
    )


def speed_figures(records: Records, points: list[TrialRow], best: TrialRow) -> dict[str, list[Figure | None]]:
    """Build the figures of the trials that have a speed, fastest first."""
    result, unit = records.result, records.result.unit
    frame = tables.trial_frame(result, by_speed(points))
    ranked = frame.rename(columns={"trial": BY_SPEED})
    return {
        "Speed over each axis": [figures.over_axis(frame, axes(points), key, unit) for key in axes(points)],
        "Where the time goes": [figures.phases(ranked, BY_SPEED), figures.waits(ranked, BY_SPEED)],
        "Scaling and cost": [
            figures.efficiency(frame, best, unit),
            figures.pareto(frame, unit, result.search.front if result.search else ()),
        ],
        "Accuracy and latency": [figures.accuracy_latency(frame)],
    }


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
    batch = records.experiment[GLOBAL_BATCH]
    steps = [{"stage": stage.stage, "batch": batch, **tables.phase_ms(stage.metrics)} for stage in result.stages]
    return Page(
        "run",
        result.name,
        result.status,
        lead or ["No stage is complete yet."],
        precision_note(student) if student else [],
        {
            "Learning": [timeline.losses(histories), timeline.accuracy(histories, list(histories))],
            "Where the time goes": [
                timeline.wall_time_of_run(result),
                figures.phases(pd.DataFrame(steps), "stage") if steps else None,
                timeline.waits(histories),
                timeline.speed(histories),
                *(tables.phase_table(stage.metrics, f"A step of the {stage.stage}") for stage in result.stages),
            ],
            "Hardware": timeline.hardware(histories),
        },
        facts_of(student.metrics) if student else {},
    )


def precision_note(outcome: Outcome) -> list[str]:
    """Say which precision `auto` chose, and why."""
    return [f"Precision auto: {outcome.precision}: {outcome.precision_reason}."] if outcome.precision_reason else []


def facts_of(metrics: Mapping[str, float]) -> dict[str, str]:
    return {names.label(name).head: names.metric_cell(metrics, name) for name in FACTS if name in metrics}


def over_time(records: Records) -> list[Figure | None]:
    """Build the figures over time: accuracy and wall time of the best and the most accurate trials, and the hardware of all.

    If accuracies are equal or missing, the fastest trials take the place of the most accurate ones.
    """
    best, histories = records.best, records.histories

    def rank(row: TrialRow) -> tuple[bool, float, float]:
        return best is None or row.id != best.id, -row.metrics.get("top1_pct", 0.0), -row.metrics["images_per_s"]

    trials = {f"trial {row.id}": row for row in sorted(ran(records.rows), key=rank)[:MAX_SERIES]}
    return [timeline.accuracy(histories, list(trials)), timeline.wall_time(trials), *timeline.hardware(histories)]
