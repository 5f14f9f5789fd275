"""What the terminal shows of a run: its tables, what they say, and how to go on."""

from collections.abc import Collection, Mapping
from typing import Any

from service.report.run_records import hangs_of, rows_of, teacher_lines
from service.report.seeds import seed_table, seeds_sentence
from service.report.table import Table
from service.report.tables import node_table, phase_table, stage_table, sweep_table
from service.report.under_way import UnderWay
from service.report.winner import command
from service.report.winner import lines as sentences
from service.runs.result import RunResult
from service.runs.run_log import read_log
from service.runs.stored.stored_runs import display_name
from trainables.rundir import RunDir


def report_of(result: RunResult, run_dir: RunDir) -> list[Any]:
    """Everything `distill report` shows of a run directory, finished or not: tables and lines."""
    parts = [*overview(result, run_dir), *note_lines(result)]
    if result.kind == "sweep" and result.best:
        parts += measured(result.best.metrics, f"trial {result.best.id}")
        parts.append(f"train at that point: {command(run_dir.root, result.best)}")
    for stage in result.stages:
        parts += measured(stage.metrics, f"the {stage.stage}") if stage.metrics else []
    parts += hangs_of(read_log(run_dir))
    if result.status != "complete":
        parts += UnderWay(run_dir).lines()
    if result.status in ("interrupted", "failed"):
        parts.append(f"continue it with: distill resume {display_name(run_dir.root)}")
    return parts


def overview(result: RunResult, run_dir: RunDir, only: Collection[str] | None = None) -> list[Any]:
    """How a run stands: its trials and what they say, or its stages. `only`: as in `sweep_table`."""
    parts: list[Any] = [
        f"{result.kind} {result.name} in {display_name(run_dir.root)}: {result.status} {result.reason or ''}".rstrip()
    ]
    if result.trials is not None:
        parts += compared(result, only)
    elif result.stages:
        parts.append(stage_table(result.name, result.stages))
    return parts + teacher_lines(result)


def compared(result: RunResult, only: Collection[str] | None = None) -> list[Any]:
    """A sweep's trials, its points over several seeds, and what that says. `only`: as in `sweep_table`."""
    over_seeds = seed_table(result)
    tables = [sweep_table(result, rows_of(result), only), *([over_seeds] if over_seeds else [])]
    return [*tables, *verdict(result), *seeds_sentence(result)]


def verdict(result: RunResult) -> list[str]:
    """Which configuration won, why, where its step's time goes, and how sure that is."""
    return sentences(result, rows_of(result))


def measured(metrics: Mapping[str, float], what: str) -> list[Table]:
    """Where the time went, and what the nodes did meanwhile."""
    tables = (phase_table(metrics, f"a step of {what}"), node_table(metrics, f"the hardware under {what}: mean (peak)"))
    return [table for table in tables if table is not None]


def note_lines(result: RunResult) -> list[str]:
    return [f"note: {line}" for line in result.notes]
