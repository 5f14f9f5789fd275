"""`report`, `compare` and `doctor`: what a run or a sweep came to. They run no code of the run's author."""

from pathlib import Path

import click

from service.commands.options import DIR, RUNS_OR_URI, SET, PathType, RunOrRecipe, is_given, is_run_folder, print_all
from service.config.experiment import load
from service.doctor.measure import measured_lines, parts_of, probe
from service.doctor.read_run import read_run
from service.doctor.terminal_lines import case_lines
from service.report.compare import compare as run_compare
from service.report.compare import comparison_lines, comparison_page
from service.report.document import write
from service.report.page import write_page
from service.report.records import records_of_run
from service.report.terminal import report_of
from service.report.terminal import watch as follow
from service.runs.display import output
from service.runs.run_directory import reopen
from service.runs.stored.stored_runs import run_folder
from trainables.object_store.store import is_uri

HTML = PathType(dir_okay=False)


@click.command()
@DIR
@click.option("--html", type=HTML, help="Where the page goes; default: DIR/report.html.")
@click.option("--watch", is_flag=True, help="Follow a run: tables and page are renewed until it ends.")
def report(directory: Path, html: Path | None, watch: bool) -> None:
    """Tables of a finished or running run or sweep, and one HTML page with figures: DIR/report.html."""
    records = follow(directory, output(), html) if watch else records_of_run(directory)
    print_all(report_of(records))
    click.echo(f"page: {write_page(records, html)}")


@click.command()
@click.argument("a", type=PathType(run_folder))
@click.argument("b", type=PathType(run_folder))
@click.option("--html", type=HTML, help="Also write the comparison as a page here.")
def compare(a: Path, b: Path, html: Path | None) -> None:
    """Two sweeps or runs side by side: the best of each, speed at common points, and the differences between the experiments."""
    comparison = run_compare(records_of_run(a), records_of_run(b))
    print_all(comparison_lines(comparison))
    if html:
        write(comparison_page(comparison), html)
        click.echo(f"page: {html}")


@click.command()
@click.argument("directory_or_recipe", type=RunOrRecipe(), metavar="DIR_OR_RECIPE")
@SET
@click.option("--measure", is_flag=True, help="Time the steps again without loading, teacher or all-reduce: what each costs.")
@RUNS_OR_URI
def doctor(directory_or_recipe: str, overrides: tuple[str, ...], measure: bool, root: Path) -> None:
    """Where a step's time goes and what to change: of a run or sweep by its records, of a recipe by a short timing run."""
    measured = list[str]()
    if is_uri(directory_or_recipe):
        directory_or_recipe = str(run_folder(directory_or_recipe))
        reopen(Path(directory_or_recipe))
    if is_run_folder(directory_or_recipe):
        for option, name in {"--set": "overrides", "--measure": "measure", "--runs": "root"}.items():
            if is_given(name):
                raise click.UsageError(f"{option}: is for the timing run of a recipe; give the run's experiment.yaml")
        cases = read_run(*reopen(Path(directory_or_recipe)))
    else:
        resolved = load(directory_or_recipe, overrides)
        cases, steps_ms = probe(resolved, root, parts_of(resolved.experiment) if measure else ())
        measured = measured_lines(cases[0].evidence, steps_ms)
    print_all([*case_lines(cases), *measured])
