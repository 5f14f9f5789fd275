"""The terminal report of a run: its tables, conclusions and next steps; optionally refreshed until the run ends."""

import time
from collections.abc import Collection, Mapping
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from service.report.records import Records, ended, hang_lines, records_of_run, running_stage_lines, teacher_lines
from service.report.seeds import seed_table, seeds_sentence
from service.report.table import Table
from service.report.tables import node_table, phase_table, stage_table, sweep_table
from service.report.winner import command, lead, notes
from service.runs.result import RunResult
from service.runs.stored.stored_runs import display_name, shell_name

WATCH_S = 3.0
MAX_SHARE = 0.1  # of a core that watching may take from the run
OTHER_ROWS = 12  # rows of the screen outside the table


def report_of(records: Records) -> list[RenderableType]:
    """Return everything that `distill report` shows of a run, finished or not: tables and lines."""
    result, root = records.result, records.run_dir.root
    parts = overview(records)
    if records.is_sweep and result.best:
        parts += measured(result.best.metrics, f"trial {result.best.id}")
        parts.append(f"train at this point: {command(records.run_dir, records.log, result.best)}")
    for stage in result.stages:
        parts += measured(stage.metrics, f"the {stage.stage}")
    parts += hang_lines(records.log)
    if result.status != "complete":
        parts += running_stage_lines(records)
    if result.status in ("interrupted", "failed"):
        parts.append(f"continue it with: distill resume {shell_name(root)}")
    return parts


def overview(records: Records, only: Collection[str] | None = None) -> list[RenderableType]:
    """Return the status and summary of a run. `only` is as in `sweep_table`."""
    result, root = records.result, display_name(records.run_dir.root)
    return [f"{result.kind} {result.name} in {root}: {result.status} {result.reason or ''}".rstrip(), *summary(result, only)]


def summary(result: RunResult, only: Collection[str] | None = None) -> list[RenderableType]:
    """Return a sweep's trials, points over seeds and conclusions, or a run's stages; then teachers and notices."""
    if result.trials is not None:
        tables = [sweep_table(result, only), seed_table(result)]
        lines = [*verdict(result), *seeds_sentence(result)]
    else:
        tables, lines = [stage_table(result.name, result.stages)], []
    return [*filter(None, tables), *lines, *teacher_lines(result), *(f"note: {line}" for line in result.notes)]


def verdict(result: RunResult) -> list[str]:
    """Say which configuration won, why, where its step time goes, and how certain that is."""
    return [*lead(result), *notes(result)]


def measured(metrics: Mapping[str, float], what: str) -> list[Table]:
    """Return the tables of phase times and of the nodes' telemetry."""
    tables = (phase_table(metrics, f"a step of {what}"), node_table(metrics, f"the hardware under {what}: mean (peak)"))
    return list(filter(None, tables))


def watch(directory: Path, console: Console, html: Path | None) -> Records:
    """Show a run on the terminal and update its page until it stops running; return its final records.

    A run whose driver was killed counts as interrupted.

    Raises:
        ExperimentError: there is no run, or the page cannot be written.
        KeyboardInterrupt: the user pressed Ctrl-C.
    """
    from service.report.page import write_page

    with Live(console=console, auto_refresh=False, transient=True) as live:
        while True:
            began, records = time.monotonic(), records_of_run(directory)
            if records.result.status != "running":
                return records
            if console.is_interactive:
                parts = [*overview(records, rows_on_screen(records.result, console.height)), *running_stage_lines(records)]
                live.update(Group(*(Text(part) if isinstance(part, str) else part for part in parts)), refresh=True)
            write_page(records, html)
            time.sleep(max(WATCH_S, (time.monotonic() - began) / MAX_SHARE))


def rows_on_screen(result: RunResult, height: int) -> set[str]:
    """Return the trials of a sweep that fit on the screen: the best, and those that ended last."""
    last = ended(result.rows)[-max(4, height - OTHER_ROWS) :]
    return {row.id for row in (*last, *([result.best] if result.best else []))}
