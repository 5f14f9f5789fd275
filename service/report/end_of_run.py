"""What a run or sweep shows at its end: tables and sentences on the terminal, and its page; see `service.runs.session`."""

from collections.abc import Callable, Sequence

from rich.console import RenderableType

from service.report import terminal_tables as terminal
from service.report.run_records import teacher_lines
from service.report.tables import phase_table, stage_table
from service.report.terminal_tables import verdict
from service.runs.result import RunResult
from service.runs.stored.stored_runs import display_name
from trainables.rundir import RunDir

__all__ = ["tables", "verdict", "write_page_at_end"]


def tables(result: RunResult) -> Sequence[RenderableType]:
    """The trials of a sweep with what they say; of a run its stages, and where a step of its student goes; teachers, notices."""
    lines = [*teacher_lines(result), *terminal.note_lines(result)]
    if result.kind == "sweep":
        return [*terminal.compared(result), *lines]
    phases = phase_table(result.stages[-1].metrics, "a step of the student")
    return [stage_table(result.name, result.stages), *([phases] if phases is not None else []), *lines]


def write_page_at_end(run_dir: RunDir, result: RunResult, echo: Callable[[str], None]) -> None:
    """Write the page. What goes wrong here is logged, and is no reason for a run to fail that has succeeded."""
    from service.report.page import write_page  # imports scipy, which a run that is starting does not need

    try:
        write_page(run_dir, result)
    except Exception as error:
        again = f"distill report {display_name(run_dir.root)}"
        echo(f"report.html was not written ({type(error).__name__}: {error}); try again: {again}")
