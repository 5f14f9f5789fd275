"""MLflow runs. What MLflow did not take stays on disk and is sent later, in order and once.

The driver's calls append to a spool (`spool`); a thread, or `distill sync` later, carries it to the store (`sender`). Only
`mlflow_store`, `student_model` and `ui_app` import MLflow.
"""

from service.tracking.shown_metrics import of_summary
from service.tracking.spool import Delivery
from service.tracking.tracker import Tracker, compare_urls, default_uri, sync, sync_neighbours, ui_command, ui_environment
from service.tracking.views import saved_views

__all__ = [
    "Delivery",
    "Tracker",
    "compare_urls",
    "default_uri",
    "of_summary",
    "saved_views",
    "sync",
    "sync_neighbours",
    "ui_command",
    "ui_environment",
]
