"""Fixtures that every test may use."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import psutil
import pytest

from tests.s3 import s3, s3_server

if TYPE_CHECKING:
    from trainables.distributed.rank_pool import RankPool

__all__ = ["s3", "s3_server"]

# Before torch is imported, here and in every process that a test starts: tiny tensors on few cores go faster on one thread.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Ray's workers are at niceness 15, and would wait for all other tests of a busy machine.
os.environ.setdefault("RAY_worker_niceness", "0")

# No test sends anything to the user's own store.
os.environ.pop("MLFLOW_TRACKING_URI", None)

# A shell's background job ignores Ctrl-C, and so would every command that a test starts and interrupts.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """SIGTERM ends the session as Ctrl-C does, with all tearing down. Set for each test, since `ray.init` sets another."""

    def stop(signal_number: int, frame: FrameType | None) -> None:
        item.session.shouldstop = "SIGTERM"  # also where the test takes the KeyboardInterrupt for its own
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)


os.register_at_fork(after_in_child=functools.partial(signal.signal, signal.SIGTERM, signal.SIG_DFL))


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish(exitstatus: int) -> Generator[None, None, None]:
    """What an interrupted session has started ends with it, whether a fixture knows of it or not."""
    family = psutil.Process().children(recursive=True) if exitstatus == pytest.ExitCode.INTERRUPTED else []
    yield
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


# What ranks of a job import, torch._dynamo at the first step of an optimizer.
multiprocessing.set_forkserver_preload(["tests.trainables.jobs", "torch._dynamo"])


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Up to three ranks of a job, as processes that live as long as the test session."""
    from trainables.distributed.rank_pool import RankPool  # torch, which not every test needs

    pool = RankPool(fork_server=True)
    yield pool
    pool.close()


PROCESSES = (
    "tests/integration/",
    "tests/test_sigterm.py",
    "tests/trainables/data/test_fuzz.py",
    "tests/trainables/data/storage/",
    "tests/service/tracking/",
    "tests/trainables/engine/pipeline/",
    "tests/benchmarks/",
    "tests/gpu/",
)
"""Tests whose processes, servers or simulated clusters take seconds; single ones elsewhere have the mark themselves."""


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Without `processes` the folders of those are not imported either, which takes seconds of Ray and MLflow."""
    if "not processes" not in config.option.markexpr or not collection_path.is_relative_to(config.rootpath):
        return None
    path = collection_path.relative_to(config.rootpath).as_posix()
    return f"{path}/".startswith(PROCESSES) or path.startswith(PROCESSES) or None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as `processes` what the quick tests leave out: ranks in processes, servers, killed children, whole simulations."""
    for item in items:
        path = item.nodeid.partition("::")[0]
        if {"ranks", "s3"} & {*getattr(item, "fixturenames", ())} or path.startswith(PROCESSES):
            item.add_marker(pytest.mark.processes)
