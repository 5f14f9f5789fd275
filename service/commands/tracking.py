"""`ui` and `sync`: records in MLflow."""

import os
import re
import secrets
import socket
import subprocess
from pathlib import Path

import click

from service.commands.options import DIR, RUNS_OR_URI
from service.runs.mlflow_view import MlflowView
from service.runs.run_directory import as_it_stands, check_writable, reopen
from service.runs.stored.stored_runs import display_name, uri_of
from service.tracking.stores import ui_command, ui_environment
from service.tracking.sync import sync as run_sync
from trainables.errors import ClusterError, ExperimentError


@click.command()
@RUNS_OR_URI
@click.option("--host", default="127.0.0.1", show_default=True, help="Anything but loopback shows your records to the network.")
@click.option("--port", type=click.IntRange(1, 65535), default=5000, show_default=True)
@click.option("--allow-changes", is_flag=True, help="Let the UI change and delete records; without it, it only shows them.")
def ui(root: Path, host: str, port: int, allow_changes: bool) -> None:
    """MLflow's UI on the records under the runs' root.

    The address that it prints has a token in it: other users of this machine reach the port, but not the records. The token is
    that of RAYDISTILL_UI_TOKEN where that is set; MLflow's clients send it as MLFLOW_TRACKING_TOKEN.
    """
    check_writable(root, None)
    check_address(host, port)
    token = os.environ.get("RAYDISTILL_UI_TOKEN") or secrets.token_urlsafe(24)
    if not re.fullmatch(r"[\w.~-]{8,}", token):
        raise ExperimentError("RAYDISTILL_UI_TOKEN: write at least 8 letters, digits and characters of `.~_-`, or unset it")
    # MLflow 3.17 opens as a tool for language models unless the address says otherwise.
    address = f"http://{host}:{port}/?token={token}#/experiments?workflowType=machine_learning"
    click.echo(f"MLflow on {root}: {address} (Ctrl-C ends it)")
    # From the folder of this package: a server imports from its working directory first.
    folder = Path(__file__).parents[2]
    environment = ui_environment(token, changes=allow_changes)
    # The server ends when its standard input does (`ui_app`), so also where this process is killed, or its terminal closed.
    server = subprocess.Popen(
        ui_command(root, host, port), env=environment, cwd=folder, stdin=subprocess.PIPE, start_new_session=True
    )
    try:
        raise click.exceptions.Exit(server.wait())
    finally:
        server.terminate()
        server.communicate()


def check_address(host: str, port: int) -> None:
    """Refuse an address where no server can listen: MLflow itself would try for ever, and it may be another server's.

    Raises ClusterError: with the system's reason.
    """
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as error:
        reason = str(error.strerror).partition(" (while ")[0]  # Python appends the address
        raise ClusterError(f"{host}:{port} cannot be listened on ({reason}): give another --port, or --host") from error


@click.command()
@DIR
def sync(directory: Path) -> None:
    """Send MLflow the records that it does not have yet."""
    _, run_dir, result = reopen(directory)
    if uri_of(run_dir.root) and as_it_stands(run_dir, result).status == "running":
        raise ExperimentError(f"{display_name(run_dir.root)} is running, and its driver sends its records: wait for it")
    if result.mlflow is None:
        click.echo(f"{display_name(run_dir.root)} has nothing for MLflow: its experiment says tracking.enabled: false")
        return
    delivery = run_sync(run_dir, result.mlflow.uri, result.mlflow.experiment, MlflowView, name=display_name(run_dir.root))
    click.echo(delivery.message)
    if not delivery.is_complete:
        raise click.exceptions.Exit(1)
