"""`clean`: old runs, their checkpoints and caches."""

import re
import time
from pathlib import Path

import click

from service.commands.options import RUNS_OR_URI, check_given
from service.runs.clean import Cleaner
from service.runs.clean import clean as run_clean
from trainables.data.storage.free_space import format_bytes

UNITS_S = {"h": 3600, "d": 86400, "w": 7 * 86400}


def check_age(context: click.Context, parameter: click.Parameter, age: str) -> str:
    """Refuse what is not written as 12h, 30d or 4w."""
    if re.fullmatch(r"\d+(\.\d+)?[hdw]", age) is None:
        raise click.BadParameter(f"{age!r}: write a number of hours, days or weeks, such as 12h, 30d or 4w")
    return age


@click.command()
@click.option("--older-than", "age", callback=check_age, required=True, help="Unused for this long: 12h, 30d, 4w.")
@click.option("--dry-run", is_flag=True, help="Only list what would be removed.")
@click.option("--unfinished", is_flag=True, help="Also runs that could be resumed.")
@click.option("--checkpoints", "checkpoints_only", is_flag=True, help="Only checkpoints that a complete run no longer needs.")
@RUNS_OR_URI
def clean(age: str, dry_run: bool, unfinished: bool, checkpoints_only: bool, root: Path) -> None:
    """Remove old runs and caches that nothing needs.

    A run is kept while a process works on it, while records of it wait for MLflow, while the experiment of another run that is
    kept names it (as teacher.weights may), and as long as it can be resumed, unless --unfinished is given. Only runs of this root
    count. MLflow's records stay.
    """
    check_given("--unfinished excludes --checkpoints")
    cleaner = Cleaner(time.time() - float(age[:-1]) * UNITS_S[age[-1]], dry_run, click.echo)
    run_clean(root, cleaner, unfinished=unfinished, checkpoints_only=checkpoints_only)
    click.echo(f"{format_bytes(cleaner.num_bytes)} {'would be' if dry_run else 'were'} freed")
