"""`reproduce`: a table of published accuracies, run again."""

from dataclasses import replace
from datetime import datetime
from pathlib import Path

import click

from service.cluster.local_ray import RayLostError
from service.commands.options import RUNS, SET, FileOrUri, NameOrFile, PathType, print_all
from service.reproduce import terminal
from service.reproduce.run_table import (
    Reproduction,
    cells,
    check_begun,
    prepare,
    run_sweeps,
    size_differences,
    teachers_of,
    write_table_result,
)
from service.reproduce.sweeps import Request, changes, compose
from service.reproduce.table import read_table
from service.runs.run_directory import check_writable, new_run_dir
from trainables.errors import ClusterError, TrainingError


@click.command()
@click.argument("table", type=NameOrFile())
@click.option("--pairs", help="Teacher–student pairs with commas between them; default: all.")
@click.option("--methods", help="Columns of the table; `student` is the students alone; default: all.")
@click.option("--seeds", default="0,1,2", show_default=True)
@click.option("--data", "data_path", type=FileOrUri(), help="As data.path; default: the recipe's.")
@click.option("--teachers", type=PathType(), help="Folder of published checkpoints.")
@SET
@click.option("--out", type=PathType(), help="Folder of its sweeps; default: ROOT/reproduce-TABLE-TIME.")
@RUNS
@click.option("--dry-run", is_flag=True, help="Print the plan and what there is of it in --out.")
def reproduce(
    table: str,
    pairs: str | None,
    methods: str | None,
    seeds: str,
    data_path: str | None,
    teachers: Path | None,
    overrides: tuple[str, ...],
    out: Path | None,
    root: Path,
    dry_run: bool,
) -> None:
    """Run a TABLE of published accuracies (cifar100, imagenet, modern, or a file) and compare; with the same --out: continue."""
    published = read_table(table)
    request = Request.of(published, pairs, methods, seeds)
    changed = changes(overrides)
    sweeps = compose(published, request, overrides, data_path, teachers)
    check_writable(root, out)
    stem = f"reproduce-{Path(table).stem}"
    planned_out = out or root / f"{stem}-{datetime.now():%Y%m%d-%H%M%S}"
    job = Reproduction(published, request, sweeps, changed, planned_out.absolute(), root)
    check_begun(job)
    print_all([terminal.plan_grid(job)])
    if dry_run:
        if out is not None:
            print_results(replace(job, changed=(*changed, *size_differences(job))))
        return
    data = prepare(job)
    out = new_run_dir(root, stem, out).root.absolute()
    job = replace(job, changed=(*changed, *size_differences(job)), out=out)
    try:
        failed = run_sweeps(job, data, click.echo)
    except KeyboardInterrupt:
        click.echo(f"interrupted; repeat the command with --out {out} to continue", err=True)
        raise
    except RayLostError as error:
        raise ClusterError(f"{error}; repeat the command with --out {out} to continue") from error
    click.echo(f"result: {write_table_result(job, table)}")
    print_results(job)
    if failed:
        raise TrainingError("\n".join(failed))


def print_results(job: Reproduction) -> None:
    """Ours and the published numbers, as far as there are any."""
    teachers = terminal.teachers_grid(job.table, teachers_of(job))
    print_all([teachers, terminal.cells_grid(job.table, cells(job), job.changed)])
