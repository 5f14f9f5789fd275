"""Sends runs to MLflow: `service.runs.mlflow_view` computes what MLflow shows from a run's log, and `sync` sends it.

Only `mlflow_store`, `server_check`, `student_model` and `ui_app` import MLflow.
"""

from service.tracking.run_view import SyncState
from service.tracking.stores import compare_urls, default_uri, ui_command, ui_environment
from service.tracking.sync import Delivery, Syncing, sync, sync_pending_runs

__all__ = [
    "Delivery",
    "SyncState",
    "Syncing",
    "compare_urls",
    "default_uri",
    "sync",
    "sync_pending_runs",
    "ui_command",
    "ui_environment",
]
