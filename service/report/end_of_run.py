"""The output at the end of a run or sweep: tables and sentences on the terminal, and the page; see `service.runs.session`."""

from collections.abc import Callable, Sequence

from rich.console import RenderableType

from service.config.experiment import read_resolved
from service.report import terminal
from service.report.records import read_records, with_step_times
from service.report.tables import phase_table
from service.runs.result import RunResult
from service.runs.run_log import read_log
from service.runs.stored.stored_runs import shell_name
from trainables.rundir import RunDir


def summary(run_dir: RunDir, result: RunResult) -> tuple[Sequence[RenderableType], list[str]]:
    """Return the first part of `distill report`, for a single run with the student's phase times, and a sweep's verdict."""
    if result.kind == "train":
        phases = phase_table(result.stages[-1].metrics, "a step of the student")
        return [*terminal.summary(result), *([phases] if phases else [])], []
    result = with_step_times(result, read_log(run_dir))
    return terminal.summary(result), terminal.verdict(result)


def write_page_at_end(run_dir: RunDir, result: RunResult, echo: Callable[[str], None]) -> None:
    """Write the page. Errors are only logged, since they must not fail a successful run."""
    from service.report.page import write_page  # imports scipy, which would delay the start of a run

    try:
        experiment = read_resolved(run_dir.experiment, reading=True).experiment
        write_page(read_records(run_dir, read_log(run_dir), result, experiment))
    except Exception as error:
        again = f"distill report {shell_name(run_dir.root)}"
        echo(f"report.html was not written ({type(error).__name__}: {error}); try again: {again}")
