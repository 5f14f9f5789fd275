"""A run's MLflow store: its URI, the checks before a run begins, and the command and URLs that open it."""

import os
import sys
from pathlib import Path

from service.config.uris import checked_uri
from service.tracking.run_view import SyncState
from trainables.errors import ExperimentError, first_line
from trainables.redact import redact
from trainables.rundir import RunDir, unwritable_reason

SERVERS = ("http://", "https://", "databricks")

NO_TELEMETRY = {"MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"}
"""Environment that turns off the telemetry of MLflow and its UI. MLflow reads it at import."""

CLIENT_ENVIRONMENT = {
    **NO_TELEMETRY,
    # MLflow would repeat a create_run whose answer is late; `sync` first checks whether the run exists.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    # Otherwise a logged model would get the uv.lock and pyproject.toml of the working directory.
    "MLFLOW_UV_AUTO_DETECT": "false",
}


def default_uri(runs_root: Path) -> str:
    """Return the URI of a runs' root's SQLite store. It is absolute, since Ray changes the working directory.

    Raises ExperimentError: an SQLite URI cannot express the path.
    """
    return checked_uri(f"sqlite:///{Path(os.path.abspath(runs_root)) / 'mlflow.db'}")


def check_store(uri: str, experiment: str) -> None:
    """Raise ExperimentError for a SQLite store that cannot be opened, or a server that will never accept records.

    Creates nothing.
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
    if reason := unwritable_reason(path.parent):
        raise ExperimentError(f"tracking.uri: {reason}: choose another")
    if path.exists() and not os.access(path, os.R_OK | os.W_OK):
        raise ExperimentError(f"tracking.uri: {path} is read-only for you: choose another")
    if path.exists() and not path.is_file():
        raise ExperimentError(f"tracking.uri: {path} is not a file: write the path of one")
    if path.exists() and path.stat().st_size:
        with open(path, "rb") as file:
            if file.read(16) != b"SQLite format 3\0":
                raise ExperimentError(f"tracking.uri: {path} is not an SQLite database: choose another file")


def ui_command(runs_root: Path, host: str = "127.0.0.1", port: int = 5000) -> list[str]:
    """Return the command that serves MLflow's UI for a runs' root behind a token; see `ui_environment`."""
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
    """Return the environment for `ui_command`. `changes` says whether users with `token` may also write and delete."""
    ours = {"RAYDISTILL_UI_TOKEN": token, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    return {**os.environ, **NO_TELEMETRY, **ours} | ({"RAYDISTILL_UI_CHANGES": "1"} if changes else {})


def compare_urls(run_dir: RunDir, base: str = "http://127.0.0.1:5000") -> list[str]:
    """Return the URLs of the saved views (table, charts) of a run's MLflow experiment, or of its list of runs without them.

    Returns [] if nothing was sent yet. `base` is the address of a server, or of the UI that `ui_command` opens.
    """
    state = SyncState.read(run_dir)
    if state is None or not state.experiment_id:
        return []
    # Without `workflowType`, MLflow 3.17 opens its pages for language models.
    page = f"{base.rstrip('/')}/#/experiments/{state.experiment_id}/runs?workflowType=machine_learning"
    modes = ("", "&compareRunsMode=CHART")
    return [f"{page}&viewStateShareKey={key}{mode}" for key, mode in zip(state.views, modes, strict=False)] or [page]


def reason_of(error: Exception) -> str:
    """Describe why a request failed, in one line without secrets."""
    return redact(first_line(root_cause(error)))[:200]


def root_cause(error: BaseException) -> BaseException:
    """Return the innermost error, such as one of a socket or SQLite, below those that only name the request."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return error
