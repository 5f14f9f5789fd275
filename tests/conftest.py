"""Fixtures that every test may use."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.trainables.ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Up to three ranks of a job, as processes that live as long as the test session."""
    pool = Ranks()
    yield pool
    pool.close()
