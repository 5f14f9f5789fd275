"""`submit`: any other command as a Ray job."""

from __future__ import annotations

from pathlib import Path

import click

from service.cluster.jobs import submit as run_submit
from service.commands.options import RUNS


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--follow", is_flag=True, help="Stream the job's log and exit with its exit code.")
@RUNS
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def submit(follow: bool, root: Path, command: tuple[str, ...]) -> None:
    """Run any other command as a Ray job: distill submit --follow train digits."""
    raise click.exceptions.Exit(run_submit(command, root, follow, click.echo))
