"""What is shown of a URI."""

from __future__ import annotations

import pytest

from service.config.uris import without_password

URI = "postgresql://me:p@ss@db:5432/mlflow"


@pytest.mark.parametrize(
    ("held", "shown"),
    [
        (URI, "postgresql://db:5432/mlflow"),
        ("s3://bucket/set", "s3://bucket/set"),
        ("sqlite:////a/b@c.db", "sqlite:////a/b@c.db"),
        ("http://[", "http://["),
        ("", ""),
    ],
)
def test_a_uri_is_shown_without_its_login(held: str, shown: str) -> None:
    assert without_password(held) == shown


def test_a_text_that_repeats_a_uri_is_shown_without_that_login() -> None:
    assert without_password(f"cannot reach {URI} as me:p@ss@db", URI) == "cannot reach postgresql://db:5432/mlflow as db"
