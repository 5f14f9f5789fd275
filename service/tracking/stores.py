"""Where the MLflow of a run is: its URI, the checks before a run begins, and what opens it."""

import os
import sys
from pathlib import Path

from service.config.uris import checked_uri
from service.tracking.run_view import SyncState
from trainables.errors import ExperimentError
from trainables.rundir import RunDir, unwritable_reason

SERVERS = ("http://", "https://", "databricks")
_SQLITE = b"SQLite format 3\0"

NO_TELEMETRY = {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"}
"""Environment in which MLflow, and its UI in the browser, send nothing to its makers. Read when MLflow is imported."""

CLIENT_ENVIRONMENT = {
    **NO_TELEMETRY,
    # A retry below this module would repeat a create_run whose answer is late; `sync` looks first whether the run is there.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    # Or a logged model would be given the uv.lock and pyproject.toml of the folder that the user stands in.
    "MLFLOW_UV_AUTO_DETECT": "false",
}


def default_uri(runs_root: Path) -> str:
    """The SQLite store of a runs' root, absolute, since Ray changes the working directory.

    Raises ExperimentError: a path that an SQLite URI cannot hold.
    """
    return checked_uri(f"sqlite:///{Path(os.path.abspath(runs_root)) / 'mlflow.db'}")


def check_store(uri: str, experiment: str) -> None:
    """Refuse a store of the user's that could not be opened, or a server that will never take records. Nothing is made.

    Raises ExperimentError.
    """
    scheme, _, named = checked_uri(uri).partition(":///")
    if uri.startswith(SERVERS):
        os.environ.update(CLIENT_ENVIRONMENT)
        from service.tracking.server_check import check_server

        check_server(uri, experiment)
    if scheme != "sqlite":
        return
    path = Path(named)
    if not path.parent.exists():
        raise ExperimentError(f"tracking.uri: there is no folder {path.parent}: create it, or choose another")
    if path.is_dir():
        raise ExperimentError(f"tracking.uri: {path} is a folder: write the path of a file in it")
    if reason := unwritable_reason(path.parent):
        raise ExperimentError(f"tracking.uri: {reason}: choose another")
    if path.exists() and not os.access(path, os.R_OK | os.W_OK):
        raise ExperimentError(f"tracking.uri: {path} is read-only for you: choose another")
    if path.exists() and not path.is_file():
        raise ExperimentError(f"tracking.uri: {path} is no file: write the path of one")
    if path.exists() and path.stat().st_size:
        with open(path, "rb") as file:
            if file.read(len(_SQLITE)) != _SQLITE:
                raise ExperimentError(f"tracking.uri: {path} is no SQLite database: choose another file")


def ui_command(runs_root: Path, host: str = "127.0.0.1", port: int = 5000) -> list[str]:
    """The command that opens MLflow's UI on the store of a runs' root, behind a token; see `ui_environment`."""
    options = {
        "--backend-store-uri": default_uri(runs_root),
        "--artifacts-destination": (Path(os.path.abspath(runs_root)) / "mlartifacts").as_uri(),
        "--host": host,
        "--port": str(port),
        "--workers": "1",
        "--app-name": "raydistill",
    }
    return [sys.executable, "-m", "mlflow", "server", *(word for option in options.items() for word in option)]


def ui_environment(token: str, *, changes: bool) -> dict[str, str]:
    """The environment of `ui_command`. `changes`: whether whoever knows `token` may also write and delete."""
    ours = {"RAYDISTILL_UI_TOKEN": token, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    return {**os.environ, **NO_TELEMETRY, **ours} | ({"RAYDISTILL_UI_CHANGES": "1"} if changes else {})


def compare_urls(run_dir: RunDir, base: str = "http://127.0.0.1:5000") -> list[str]:
    """The saved views of a run's MLflow experiment, the table and the charts; its list of runs where it has no views of ours.

    [] where the store has not taken anything. `base`: the address of a server, or of the UI that `ui_command` opens.
    """
    state = SyncState.read(run_dir)
    if state is None or not state.experiment_id:
        return []
    # MLflow 3.17 opens as a tool for language models unless the address says otherwise.
    page = f"{base.rstrip('/')}/#/experiments/{state.experiment_id}/runs?workflowType=machine_learning"
    modes = ("", "&compareRunsMode=CHART")
    return [f"{page}&viewStateShareKey={key}{mode}" for key, mode in zip(state.views, modes, strict=False)] or [page]
