"""Sends runs to MLflow: `service.runs.mlflow_view` computes what MLflow shows from a run's log, and `sync` sends it.

Only `sender`, `logged_model`, `server_check`, `student_model` and `ui_app` import MLflow.
"""
