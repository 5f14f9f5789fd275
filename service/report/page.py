"""`report.html`: one page of a run directory, finished or not."""

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from importlib.metadata import version
from pathlib import Path

from service.config.experiment import read_resolved
from service.report import document, figures, hardware, seeds, tables, timeline, winner
from service.report import labels as names
from service.report import wall_time as wall
from service.report.charts import MAX_SERIES, Figure
from service.report.document import Page, PageSection
from service.report.model_curve import model_of
from service.report.phase_shares import shares_text
from service.report.run_records import Records, axes, ended, ran, read_records, teacher_lines
from service.report.speed_by_axis import over_axis
from service.runs.outcome import Outcome
from service.runs.result import RunResult, StageRow
from service.search.rows import probes
from trainables.rundir import RunDir

RELOAD_S = 5
FACTS = (
    *("images_per_s", "epoch_s", "epoch_wall_s", "step_s", "data_pct", "top1_pct", "best_top1_pct", "linear_top1_pct", "cka"),
    *("cosine", "peak_memory_mib"),
)
"""The metrics that one looks for first."""


def write_page(run_dir: RunDir, result: RunResult, path: Path | None = None) -> Path:
    """Write the page of a run as it stands, atomically. Returns where. Raises ExperimentError: it cannot be written there."""
    path = path or run_dir.report
    resolved = read_resolved(run_dir.experiment, reading=True)
    document.write(page_of(read_records(run_dir, result, resolved.experiment, result.sources or {})), path)
    return path


def page_of(records: Records) -> Page:
    """The page of a sweep or of a run; it loads itself again while that goes on."""
    page, result = sweep_page(records) if records.is_sweep else run_page(records), records.result
    when = f"{result.started} to {result.finished or 'now'}".replace("T", " ")
    return replace(
        page,
        notes=[*page.notes, *teacher_lines(result), *result.notes, *records.hangs, *([result.reason] if result.reason else [])],
        foot=f"raydistill {version('raydistill')} · {records.root} · {when} · written {datetime.now():%Y-%m-%d %H:%M:%S}",
        refresh_s=RELOAD_S if result.status == "running" else None,
    )


def sweep_page(records: Records) -> Page:
    """What won and why, the table, speed over each axis, and all else that was measured."""
    result, rows, best, unit = records.result, records.rows, records.best, records.unit
    points, workers = probes(rows), f"{unit[0].upper()}{unit[1:]}s"
    front = result.search.front if result.search else ()
    sections = [
        PageSection(f"{workers} × batch × loader workers", [tables.heat_table(records), tables.page_trials(records)]),
        PageSection("Trials without a result", [tables.bad_trials(records)]),
        PageSection("Over seeds", [seeds.seed_table(result), seeds.seeds_figure(result)]),
        PageSection("Speed over each axis", over_axes(records)),
        PageSection("Where the time goes", [figures.phases(rows, unit), figures.waits(rows, unit)]),
        PageSection(
            "Scaling and cost", [figures.efficiency(points, best, unit) if best else None, figures.pareto(points, unit, front)]
        ),
        PageSection("Over time", over_time(records)),
        PageSection("The experiment", [tables.settings(records)]),
    ]
    if best is None:
        lead = ["No trial is complete: nothing to compare yet.", f"{len(ended(points))} of {len(points)} trials have ended."]
        return Page("sweep", result.name, result.status, lead, sections, notes=winner.without_result(rows))
    metric, mode = winner.ranking_metric(result)
    shares = shares_text(best.metrics)
    reason = winner.why(rows, best, metric, mode, unit) + (f" Its step: {shares}." if shares else "")
    return Page(
        "sweep",
        result.name,
        result.status,
        [f"{winner.won(best, unit, axes(rows), metric)} (trial {best.id})", reason, *seeds.seeds_sentence(result)],
        sections,
        facts=facts_of(best.metrics),
        notes=[*precision_note(best), *winner.without_result(rows), *winner.bound(result), *winner.doubts(result)],
        command_title="Train at that point",
        command=winner.command(records.root, best),
    )


def run_page(records: Records) -> Page:
    """What a single run reached, and how its time went."""
    result, histories = records.result, records.histories
    stages = result.stages
    student = next((stage for stage in stages if stage.stage == "student" and stage.metrics), None)
    lead = [f"The {stage.stage} {stage.model} {reached(stage)}" for stage in reversed(stages)] or ["No stage is complete yet."]
    if student and (shares := shares_text(student.metrics)):
        lead.insert(1, f"A step of the student: {shares}.")
    labels = [h.label for h in histories]
    sections = [
        PageSection("Learning", [timeline.losses_figure(histories), timeline.accuracy(histories, labels)]),
        PageSection(
            "Where the time goes",
            [
                wall.wall_time_figure([(stage.stage, stage) for stage in stages], result),
                wall.stage_phases(stages),
                timeline.waits_over_time(histories),
                timeline.speeds(histories),
                timeline.drift(histories, labels),
            ],
        ),
        PageSection("Hardware", hardware.hardware(histories)),
        PageSection("The experiment", [tables.settings(records)]),
    ]
    if student is None:
        return Page("run", result.name, result.status, lead, sections)
    return Page("run", result.name, result.status, lead, sections, facts_of(student.metrics), precision_note(student))


def precision_note(outcome: Outcome) -> list[str]:
    """Which precision `auto` came to, and why."""
    return [f"Precision auto: {outcome.precision}: {outcome.precision_reason}."] if outcome.precision_reason else []


def reached(stage: StageRow) -> str:
    """What a stage came to, in words."""
    m = stage.metrics
    if not m:
        return f"{stage.status}: {stage.reason}"
    parts = [f"reached top-1 {names.number(m['top1_pct'])}%"] if "top1_pct" in m else ["ran"]
    if "cka" in m:
        by = "by k-NN and CKA" if "top1_pct" in m else "and came to CKA"
        parts.append(f"{by} {names.number(m['cka'], 4)} with its teacher")
    if "best_top1_pct" in m and m["best_top1_pct"] != m.get("top1_pct"):
        parts.append(f"(best {names.number(m['best_top1_pct'])}%)")
    parts.append(f"in {names.number(m.get('steps'), 0)} steps")
    if "images_per_s" in m:
        parts.append(f"at {names.number(m['images_per_s'], 1)} images/s")
    return " ".join(parts) + "."


def facts_of(metrics: Mapping[str, float]) -> list[tuple[str, str]]:
    """The numbers that one looks for first."""
    return [
        (names.label(name).head, names.metric_cell(metrics, name))
        for name in FACTS
        if name in metrics and not (name == "best_top1_pct" and metrics[name] == metrics.get("top1_pct"))
    ]


def over_axes(records: Records) -> list[Figure | None]:
    """A figure an axis, the three of every sweep first."""
    best = records.best
    if best is None:
        return []
    measured = probes(records.rows)  # a training to a target has its probe's point, and a speed of other steps
    model = model_of(records.result, measured)
    return [over_axis(measured, best, key, model, records.unit) for key in axes(measured)]


def over_time(records: Records) -> list[Figure | None]:
    """Accuracy of the best trial and of the most accurate ones, their epochs, and the hardware under all of them.

    Where accuracies are the same, or there are none, the fastest ones.
    """
    best = records.best.id if records.best else None
    ranked = sorted(
        ran(records.rows),
        key=lambda row: (row.id != best, -row.metrics.get("top1_pct", 0.0), -row.metrics["images_per_s"]),
    )
    labels = [f"trial {row.id}" for row in ranked[:MAX_SERIES]]
    histories, rows = records.histories, records.rows
    return [
        timeline.accuracy(histories, labels, rows),
        timeline.drift(histories, labels, rows),
        wall.of_trials(ranked[:MAX_SERIES], rows),
        *hardware.hardware(histories),
    ]
