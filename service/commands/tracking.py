"""`ui` and `sync`: records in MLflow."""

import os
import socket
import subprocess
from pathlib import Path

import click

from service.commands.options import DIR, RUNS
from service.runs.run_directory import check_writable, reopen
from service.tracking import NO_TELEMETRY, ui_command
from service.tracking import sync as run_sync
from trainables.errors import ClusterError


@click.command()
@RUNS
@click.option("--host", default="127.0.0.1", show_default=True, help="Anything but loopback shows your records to the network.")
@click.option("--port", type=click.IntRange(1, 65535), default=5000, show_default=True)
def ui(root: Path, host: str, port: int) -> None:
    """MLflow's UI on the records under the runs' root."""
    check_writable(root, None)
    check_address(host, port)
    # MLflow 3.17 opens as a tool for language models unless the address says otherwise.
    click.echo(f"MLflow on {root}: http://{host}:{port}/#/experiments?workflowType=machine_learning (Ctrl-C ends it)")
    done = subprocess.run(ui_command(root, host, port), env={**os.environ, **NO_TELEMETRY}, check=False)
    raise click.exceptions.Exit(done.returncode)


def check_address(host: str, port: int) -> None:
    """Refuse an address where no server can listen: MLflow itself would try for ever, and it may be another server's.

    Raises:
        ClusterError: with the system's reason.
    """
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        # Of a host's name the reason is the resolver's own, and Python appends the address to it.
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error.strerror).partition(" (while ")[0]
        raise ClusterError(f"{host}:{port} cannot be listened on ({reason}): give another --port, or --host") from error


@click.command()
@DIR
def sync(directory: Path) -> None:
    """Send to MLflow what it has not taken yet."""
    _, run_dir, _ = reopen(directory)
    delivery = run_sync(run_dir)
    click.echo(delivery.message)
    if delivery.num_pending:
        raise click.exceptions.Exit(1)
