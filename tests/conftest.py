"""Fixtures that every test may use."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

# Before torch is imported, here and in every process that a test starts: tiny tensors on few cores go faster on one thread.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from trainables.distributed.rank_pool import RankPool

# A shell's background job ignores Ctrl-C, and so would every command that a test starts and interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Up to three ranks of a job, as processes that live as long as the test session."""
    pool = RankPool()
    yield pool
    pool.close()


PROCESSES = (
    "tests/integration/",
    "tests/trainables/data/test_fuzz.py",
    "tests/trainables/data/storage/",
    "tests/service/tracking/",
    "tests/benchmarks/",
)
"""Tests whose processes, servers or simulated clusters take seconds."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as `processes` what the quick tests leave out: ranks in processes of their own, killed children, whole simulations."""
    for item in items:
        path = item.nodeid.partition("::")[0]
        if "ranks" in getattr(item, "fixturenames", ()) or path.startswith(PROCESSES):
            item.add_marker(pytest.mark.processes)
