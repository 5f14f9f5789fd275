"""What is shown of a URI, and which are refused."""

from __future__ import annotations

import pytest

from service.config.uris import checked_uri, without_password
from trainables.errors import ExperimentError

URI = "postgresql://me:p@ss@db:5432/mlflow"


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        (URI, "postgresql://db:5432/mlflow"),
        ("s3://bucket/set", "s3://bucket/set"),
        ("sqlite:////a/b@c.db", "sqlite:////a/b@c.db"),
        ("http://[", "http://["),
        ("", ""),
    ],
)
def test_a_uri_is_shown_without_its_login(uri: str, shown: str) -> None:
    assert without_password(uri) == shown


def test_a_text_that_repeats_a_uri_is_shown_without_that_login() -> None:
    assert without_password(f"cannot reach {URI} as me:p@ss@db", URI) == "cannot reach postgresql://db:5432/mlflow as db"


@pytest.mark.parametrize("name", ["what?.db", "50%.db"])
def test_a_path_that_mlflow_cannot_open_is_refused(name: str) -> None:
    with pytest.raises(ExperimentError, match="choose a path without"):
        checked_uri(f"sqlite:////runs/{name}")
