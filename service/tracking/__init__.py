"""MLflow as a function of a run's log, which `service.runs.mlflow_view` reads: `sync` makes MLflow equal to it.

Only `mlflow_store`, `server_check`, `student_model` and `ui_app` import MLflow.
"""

from service.tracking.run_view import SyncState
from service.tracking.stores import compare_urls, default_uri, ui_command, ui_environment
from service.tracking.sync import Delivery, Syncing, sync, sync_neighbours

__all__ = [
    "Delivery",
    "SyncState",
    "Syncing",
    "compare_urls",
    "default_uri",
    "sync",
    "sync_neighbours",
    "ui_command",
    "ui_environment",
]
