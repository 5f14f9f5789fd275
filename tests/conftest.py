"""Fixtures that every test may use."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

# Before torch is imported, here and in every process that a test starts: tiny tensors on few cores go faster on one thread.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from tests.trainables.ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Up to three ranks of a job, as processes that live as long as the test session."""
    pool = Ranks()
    yield pool
    pool.close()
