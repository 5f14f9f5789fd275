"""URIs of stores as users write them."""

import os
import re

from trainables.errors import ExperimentError
from trainables.redact import redact_uris

STORES = re.compile(
    r"""(?!.*\0)(?: databricks(?::.*)?
    | https?://(?:[^/]*@)?(?:\[[0-9a-fA-F:.]+\]|[^/:@\[\]?\#]+)(?::\d{1,5})?(?:[/?\#].*)?
    | sqlite(?:\+\w+)?:///.+
    | (?:postgresql|mysql|mssql)(?:\+\w+)?://.+ )""",
    re.VERBOSE,
)
"""What MLflow can write to."""


def checked_uri(uri: str) -> str:
    """`uri`, a relative SQLite path made absolute. Raises ExperimentError: not a kind of store that MLflow writes to."""
    if STORES.fullmatch(uri) is None:
        server, file = "http://HOST:PORT for a server", "sqlite:////ABSOLUTE/PATH/mlflow.db for a file"
        raise ExperimentError.of_key("tracking.uri", f"{uri!r} is not a store: write {server}, {file}, or leave it out")
    if not uri.startswith("sqlite"):
        return uri
    path = os.path.abspath(uri.partition("///")[2])
    if "?" in path or "%" in path:
        raise ExperimentError(f"MLflow cannot open a database at {path}: choose a path without `?` and `%`")
    return f"sqlite:///{path}"


def secret_refusal(key: str, value: object) -> str:
    """Why the value of `key`, which has a password or a key in it, is refused, and how to give the secret instead."""
    scheme = str(value).partition(":")[0].partition("+")[0]
    instead = {
        "tracking.uri": "leave it out of the URI and set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD",
        "postgresql": "leave it out of the URI and give it in PGPASSWORD or ~/.pgpass",
        "s3": "leave it out of the URI and give it in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or ~/.aws",
    }
    how = instead.get(scheme) or instead.get(key, "give it in the environment, or in the file where its file system looks for it")
    return f"{key} has a password or a key in it ({redact_uris(str(value))}), and it would be written into every record: {how}"
