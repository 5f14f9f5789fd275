"""URIs of stores as users write them, and as they are shown: without the password."""

import os
from urllib.parse import urlsplit

from trainables.errors import ExperimentError

SCHEMES = ("http", "https", "sqlite", "postgresql", "mysql", "mssql", "databricks")


def without_password(text: str, uri: str | None = None) -> str:
    """`text` without the name and password that `uri` has (without `uri`: that it has itself, being one)."""
    try:
        login, at, _ = urlsplit(text if uri is None else uri).netloc.rpartition("@")
    except ValueError:  # "http://[": no URI
        return text
    return text.replace(login + at, "") if at else text


def checked_uri(uri: str) -> str:
    """`uri`, a relative SQLite path made absolute.

    Raises:
        ExperimentError: not a kind of store that MLflow writes to.
    """
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
