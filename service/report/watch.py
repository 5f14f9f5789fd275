"""`distill report --watch`: the tables on the terminal and the page on disk follow a run until it ends."""

import time
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from service.report.page import write_page
from service.report.run_records import UNRUN
from service.report.terminal_tables import overview
from service.report.under_way import UnderWay
from service.runs.result import RunResult
from service.runs.run_directory import abandoned, as_it_stands, reopen
from service.search.rows import probes
from trainables.rundir import RunDir

EVERY_S = 3.0
SHARE = 0.1  # of a core that tables and page may take from the run that is watched
ABOUT_ROWS = 12  # of a screen that is not the table


def watch(directory: Path, console: Console, html: Path | None) -> tuple[RunDir, RunResult]:
    """Follow a run until it is no longer running. Returns how it stands then, its page written.

    A run whose driver was killed and could not say so counts as interrupted.

    Raises:
        ExperimentError: no run there, or the page cannot be written.
        KeyboardInterrupt: the reader has seen enough.
    """
    _, run_dir, result = reopen(directory)
    under_way, shown, due = UnderWay(run_dir), "", 0.0
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while result.status == "running":
            began = time.monotonic()
            if began >= due:
                if console.is_interactive:
                    parts = [*overview(result, run_dir, rows_on_screen(result, console.height)), *under_way.lines()]
                    live.update(Group(*(Text(part) if isinstance(part, str) else part for part in parts)), refresh=True)
                elif (now := progress(result)) != shown:  # in a file: a line for every change
                    console.print(now, soft_wrap=True)
                    shown = now
                write_page(run_dir, result, html)
                due = time.monotonic() + max(EVERY_S, (time.monotonic() - began) / SHARE)
            time.sleep(EVERY_S)
            alone = abandoned(run_dir)  # looked at first: a run that ends now is no longer running in what is read next
            _, run_dir, result = reopen(directory)
            if alone:
                return run_dir, as_it_stands(run_dir, result)
    return run_dir, result


def rows_on_screen(result: RunResult, height: int) -> set[str]:
    """The trials of a sweep that fit on the screen: the best and those that ended last."""
    ended = [row.id for row in result.rows if row.status not in UNRUN]
    room = max(4, height - ABOUT_ROWS)
    return {*ended[-room:], *([result.best.id] if result.best else [])}


def progress(result: RunResult) -> str:
    """One line on how far a run is."""
    if result.trials is None:
        stages = ", ".join(stage.stage for stage in result.stages)
        return f"{result.name}: {result.status}" + (f", {stages} ended" if stages else "")
    rows = probes(result.rows)
    ended = sum(row.status not in UNRUN for row in rows)
    best = result.best
    best_text = f", best {best.id}: {best.metrics.get('images_per_s', 0.0):,.1f} images/s" if best else ""
    return f"{result.name}: {ended} of {len(rows)} trials{best_text}"
