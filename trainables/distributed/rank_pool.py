"""A pool of processes that act as the ranks of a job, in real Gloo groups, without Ray. Processes are reused over runs."""

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
"""How long a rank waits for peers in a collective, or for a peer that raised, before it fails."""


class RankDiedError(RuntimeError):
    """A rank's process died during a run."""


class RankPool:
    """`run(n, function, *args)` calls `function(group, *args)` on n ranks and returns their results in rank order."""

    def __init__(self, max_ranks: int = 3, *, fork_server: bool = False):
        """By default, ranks are spawned and as independent as Ray's workers: each has its own imports and its own hash seed.

        With `fork_server` they are forked from a process that has imported what `multiprocessing.set_forkserver_preload` names
        and lives as long as this one. Ranks then start in milliseconds rather than seconds, which suits tests that start many
        pools.
        """
        self._max_ranks = max_ranks
        self._context = multiprocessing.get_context("forkserver" if fork_server else "spawn")
        self._run_numbers = itertools.count()
        # Ranks rendezvous through a file. It must outlive them: a group that is garbage-collected late and does not find its
        # file kills its process.
        self._rendezvous_dir = tempfile.TemporaryDirectory(prefix="ranks-")
        self._start()

    def run(self, world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Return the results in rank order. The pool remains usable whatever happens.

        Raises:
            RankDiedError: a rank's process died.
            BaseException: the error of the lowest rank, with its stack trace as the cause.
            ValueError: the pool has fewer ranks.
        """
        if world_size > self._max_ranks:
            raise ValueError(f"the pool has {self._max_ranks} ranks, not {world_size}")
        rendezvous, healthy = Path(self._rendezvous_dir.name, str(next(self._run_numbers))), False
        try:
            groups = [Group(rank, world_size, rank) for rank in range(world_size)]
            futures = [self._ranks[group.rank].submit(_run, function, group, rendezvous, args) for group in groups]
            done = wait(futures, return_when=FIRST_EXCEPTION).done
            if not any(map(_has_died, done)):  # others may be waiting for a rank that raised
                done = wait(futures, COLLECTIVE_TIMEOUT.total_seconds()).done
            healthy = len(done) == world_size and not any(map(_has_died, done))
        except BrokenProcessPool as error:
            raise RankDiedError("a rank died before this run") from error
        finally:
            if not healthy:
                self._restart()
        for rank, future in enumerate(futures):
            if future in done and _has_died(future):
                raise RankDiedError(f"rank {rank} died without a result") from future.exception()
        return [future.result() for future in futures if future in done]

    def close(self) -> None:
        self._end()
        self._rendezvous_dir.cleanup()

    def _start(self) -> None:
        """Start the processes with this one's current environment; a fork server only has that of its own start."""
        options: dict[str, Any] = {"mp_context": self._context, "initializer": _init_process, "initargs": (dict(os.environ),)}
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


def _init_process(environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    threading.Thread(target=_exit_with_parent, daemon=True).start()


def _exit_with_parent() -> None:
    """Exit with the parent, so that killing it leaves no ranks behind."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _run(function: Callable[..., Any], group: Group, rendezvous: Path, args: tuple[Any, ...]) -> Any:
    """Run the function on a rank. An error that cannot be pickled becomes a RuntimeError with its text."""
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
        dist.barrier()  # a rank must not fail while others are still connecting to it
        return function(group, *args)
    finally:
        dist.destroy_process_group()
