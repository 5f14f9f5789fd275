"""URIs of stores as users write them."""

import os
from urllib.parse import urlsplit

from trainables.errors import ExperimentError
from trainables.redact import redact_uris

SCHEMES = ("http", "https", "sqlite", "postgresql", "mysql", "mssql", "databricks")


def checked_uri(uri: str) -> str:
    """`uri`, a relative SQLite path made absolute. Raises ExperimentError: not a kind of store that MLflow writes to."""
    if "\0" in uri:
        raise ExperimentError(f"tracking.uri is {uri!r}: leave out the character NUL, which no path or address has")
    scheme = uri.partition(":")[0].partition("+")[0]
    server, file = "http://HOST:PORT for a server", "sqlite:////ABSOLUTE/PATH/mlflow.db for a file"
    if scheme not in SCHEMES or ("//" not in uri and scheme != "databricks"):
        raise ExperimentError(f"tracking.uri is {uri!r}: write {server}, {file}, or leave it out")
    if scheme in ("http", "https"):
        try:
            host, _ = urlsplit(uri).hostname, urlsplit(uri).port
        except ValueError as error:
            raise ExperimentError(f"tracking.uri is {uri!r}, which is no address: write {server}") from error
        if not host:
            raise ExperimentError(f"tracking.uri is {uri!r}: there is no host in it: write {server}")
    if scheme != "sqlite":
        return uri
    named = uri.partition("///")[2]
    if not named:
        raise ExperimentError(f"tracking.uri is {uri!r}, which names no file: write {file}")
    path = os.path.abspath(named)
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
