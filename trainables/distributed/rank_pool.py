"""A pool of processes that are the ranks of a job: real Gloo groups of any size, without Ray, started once for many runs."""

import itertools
import multiprocessing
import os
import pickle
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainables.distributed.group import Group

COLLECTIVE_TIMEOUT = timedelta(seconds=60)
"""After which a rank whose peers do not call the same collective raises, and ranks are ended that wait for one that raised."""


class RankDiedError(RuntimeError):
    """The process of a rank ended during a run."""


class RankPool:
    """`run(n, function, *args)` calls `function(group, *args)` on n ranks and returns their results in rank order."""

    def __init__(self, max_ranks: int = 3, *, fork_server: bool = False):
        """Spawned ranks are as independent as Ray's workers: each imports what it needs and has a hash seed of its own.

        `fork_server` forks them from one process that has imported torch, which lives as long as this one: a rank starts in
        milliseconds, not in seconds. That suits tests, which start many pools.
        """
        self._max_ranks = max_ranks
        self._context = multiprocessing.get_context("forkserver" if fork_server else "spawn")
        self._context.set_forkserver_preload([__name__])
        self._run_numbers = itertools.count()
        # The ranks of a run find each other by a file. It outlives them all: a group that is garbage-collected late and does
        # not find its file ends its process.
        self._rendezvous_dir = tempfile.TemporaryDirectory(prefix="ranks-")
        self._start()

    def run(self, world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """The results in rank order; the pool may be used again whatever happened.

        Raises:
            RankDiedError: a rank's process ended.
            BaseException: what the lowest rank raised, with its stack trace in its cause.
            ValueError: the pool has not so many ranks.
        """
        if world_size > self._max_ranks:
            raise ValueError(f"{world_size} ranks of a pool of {self._max_ranks}")
        rendezvous, healthy = Path(self._rendezvous_dir.name, str(next(self._run_numbers))), False
        try:
            groups = [Group(rank, world_size, rank) for rank in range(world_size)]
            futures = [self._ranks[group.rank].submit(_run, function, group, rendezvous, args) for group in groups]
            done = wait(futures, return_when=FIRST_EXCEPTION).done
            if not any(map(_has_died, done)):  # others may wait for one that raised, in a group with a longer timeout
                done = wait(futures, COLLECTIVE_TIMEOUT.total_seconds()).done
            healthy = len(done) == world_size and not any(map(_has_died, done))
        except BrokenProcessPool as error:
            raise RankDiedError("a rank ended before this run") from error
        finally:
            if not healthy:
                self._restart()
        for rank, future in enumerate(futures):
            if future in done and _has_died(future):
                raise RankDiedError(f"rank {rank} ended without an answer") from future.exception()
        return [future.result() for future in futures if future in done]

    def close(self) -> None:
        self._end()
        self._rendezvous_dir.cleanup()

    def _start(self) -> None:
        """Start the processes, each with this one's environment: a fork server has that of the time when it was started."""
        options: dict[str, Any] = {"mp_context": self._context, "initializer": _begin, "initargs": (dict(os.environ),)}
        self._ranks = [ProcessPoolExecutor(1, **options) for _ in range(self._max_ranks)]
        self._pids = [rank.submit(os.getpid) for rank in self._ranks]

    def _end(self) -> None:
        for rank in self._ranks:
            rank.shutdown()

    def _restart(self) -> None:
        pids = {pid.result() for pid in self._pids if pid.exception() is None}
        for process in multiprocessing.active_children():
            if process.pid in pids:
                process.kill()
        self._end()
        self._start()


def _has_died(rank: Future[Any]) -> bool:
    return isinstance(rank.exception(), BrokenProcessPool)


def _begin(environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A killed parent leaves no ranks behind."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _run(function: Callable[..., Any], group: Group, rendezvous: Path, args: tuple[Any, ...]) -> Any:
    """What a rank does. An error whose class cannot be pickled arrives as its text."""
    try:
        return _run_in_group(function, group, rendezvous, args)
    except BaseException as error:
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:
            raise RuntimeError(f"{type(error).__name__}: {error}") from error
        raise


def _run_in_group(function: Callable[..., Any], group: Group, rendezvous: Path, args: tuple[Any, ...]) -> Any:
    if group.world_size == 1:
        return function(group, *args)
    timeout, method = COLLECTIVE_TIMEOUT, rendezvous.as_uri()
    dist.init_process_group("gloo", init_method=method, rank=group.rank, world_size=group.world_size, timeout=timeout)
    try:
        dist.barrier()  # a rank that fails at once must not do so while others still connect to it
        return function(group, *args)
    finally:
        dist.destroy_process_group()
