"""`clean`: old runs, checkpoints, caches and what killed jobs have left."""

import re
import time
from pathlib import Path

import click

from service.commands.options import RUNS_OR_URI

UNITS_S = {"h": 3600, "d": 86400, "w": 7 * 86400}


def check_age(context: click.Context, parameter: click.Parameter, age: str) -> str:
    """Refuse what is not written as 12h, 30d or 4w."""
    if re.fullmatch(r"\d+(\.\d+)?[hdw]", age) is None:
        raise click.BadParameter(f"{age!r}: write a number of hours, days or weeks, such as 12h, 30d or 4w")
    return age


@click.command()
@click.option("--older-than", "age", callback=check_age, required=True, help="Unused for so long: 12h, 30d, 4w.")
@click.option("--dry-run", is_flag=True, help="Only list what would be removed.")
@click.option("--unfinished", is_flag=True, help="Also runs that could be resumed.")
@click.option("--checkpoints", "checkpoints_only", is_flag=True, help="Only checkpoints that a complete run needs no more.")
@RUNS_OR_URI
def clean(age: str, dry_run: bool, unfinished: bool, checkpoints_only: bool, root: Path) -> None:
    """Remove old, unused runs, caches, and leftovers of killed jobs.

    A run stays while a process works on it, while records of it wait for MLflow, while a run of this root that stays refers to
    it (as teacher.weights may), and as long as it can be resumed, unless --unfinished is given. Runs outside this root are not
    looked at, neither for weights nor for logits. Caches, leftovers and copies of runs in an object store are those of this user
    on this machine. MLflow's records stay.
    """
    if unfinished and checkpoints_only:
        raise click.UsageError("--unfinished and --checkpoints: give one of them, as --checkpoints is for complete runs alone")
    from service.runs.clean import Cleaner
    from service.runs.clean import clean as run_clean
    from trainables.data.storage.free_space import format_bytes

    cleaner = Cleaner(time.time() - float(age[:-1]) * UNITS_S[age[-1]], dry_run, click.echo)
    run_clean(root, cleaner, unfinished=unfinished, checkpoints_only=checkpoints_only)
    click.echo(f"{format_bytes(cleaner.num_bytes)} {'would be' if dry_run else 'were'} freed")
