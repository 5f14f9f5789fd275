"""What a run or sweep shows at its end: tables and sentences on the terminal, and its page; see `service.runs.session`."""

from collections.abc import Callable, Sequence

from rich.console import RenderableType

from service.config.experiment import read_resolved
from service.report.records import read_records
from service.report.tables import phase_table
from service.report.terminal import summary, verdict
from service.runs.result import RunResult
from service.runs.run_log import read_log
from service.runs.stored.stored_runs import shell_name
from trainables.rundir import RunDir

__all__ = ["tables", "verdict", "write_page_at_end"]


def tables(result: RunResult) -> Sequence[RenderableType]:
    """What `distill report` begins with, and of a run where a step of its student goes."""
    phases = phase_table(result.stages[-1].metrics, "a step of the student") if result.kind == "train" else None
    return [*summary(result), *([phases] if phases is not None else [])]


def write_page_at_end(run_dir: RunDir, result: RunResult, echo: Callable[[str], None]) -> None:
    """Write the page. What goes wrong here is logged, and is no reason for a run to fail that has succeeded."""
    from service.report.page import write_page  # imports scipy, which a run that is starting does not need

    try:
        experiment = read_resolved(run_dir.experiment, reading=True).experiment
        write_page(read_records(run_dir, read_log(run_dir), result, experiment))
    except Exception as error:
        again = f"distill report {shell_name(run_dir.root)}"
        echo(f"report.html was not written ({type(error).__name__}: {error}); try again: {again}")
