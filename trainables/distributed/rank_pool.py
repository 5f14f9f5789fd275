"""A pool of processes that are the ranks of a job: real Gloo groups of any size, without Ray, started once for many runs."""

import itertools
import multiprocessing
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, cast

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
        self._context = multiprocessing.get_context("forkserver") if fork_server else multiprocessing.get_context("spawn")
        if fork_server:
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
            BaseException: what the lowest rank raised, with its stack trace as a note.
            ValueError: the pool has not so many ranks.
        """
        if world_size > self._max_ranks:
            raise ValueError(f"{world_size} ranks of a pool of {self._max_ranks}")
        rendezvous = Path(self._rendezvous_dir.name, str(next(self._run_numbers)))
        results: dict[int, Any] = {}
        try:
            for rank, pipe in enumerate(self._pipes[:world_size]):
                _send(pipe, rank, (function, Group(rank, world_size, rank), rendezvous, args))
            while len(results) < world_size:  # all of them, also where one has raised
                pending = {pipe: rank for rank, pipe in enumerate(self._pipes[:world_size]) if rank not in results}
                failed = any(isinstance(result, BaseException) for result in results.values())
                finished = wait(list(pending), COLLECTIVE_TIMEOUT.total_seconds() if failed else None)
                if not finished:  # they wait for the one that raised, in a group with a longer timeout
                    self._restart()
                    break
                for ready in finished:
                    rank = pending[cast(Connection, ready)]
                    results[rank] = _receive(self._pipes[rank], rank)
        except BaseException:  # others may wait for a rank that died for a minute, or have results that nobody reads
            self._restart()
            raise
        for _, result in sorted(results.items()):
            if isinstance(result, BaseException):
                raise result
        return [results[rank] for rank in range(world_size)]

    def _restart(self) -> None:
        for process in self._processes:
            process.kill()
        self._end()
        self._start()

    def close(self) -> None:
        self._end()
        self._rendezvous_dir.cleanup()

    def _end(self) -> None:
        for pipe in self._pipes:
            pipe.close()  # a rank that waits for its next task reads the end of its pipe
        for process in self._processes:
            process.join(10)
            process.kill()

    def _start(self) -> None:
        self._pipes: list[Connection] = []
        self._processes = []
        for _ in range(self._max_ranks):
            parent_end, child_end = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(child_end, dict(os.environ)), daemon=True)
            process.start()
            child_end.close()
            self._pipes.append(parent_end)
            self._processes.append(process)


def _send(pipe: Connection, rank: int, task: tuple[Any, ...]) -> None:
    try:
        pipe.send(task)
    except OSError as error:
        raise RankDiedError(f"rank {rank} ended before this run") from error


def _receive(pipe: Connection, rank: int) -> Any:
    try:
        return pipe.recv()
    except (EOFError, OSError) as error:
        raise RankDiedError(f"rank {rank} ended without an answer") from error
    except Exception as error:  # a result that cannot be unpickled
        return error


def _serve(pipe: Connection, environment: dict[str, str]) -> None:
    """What a rank's process does: run tasks until the pool is closed.

    `environment` is the parent's: a fork server has that of the time when it was started.
    """
    # The process that this one was forked from may have an older environment.
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(1)
    while True:
        try:
            function, group, rendezvous, args = pipe.recv()
        except EOFError:  # the pool is closed
            return
        try:
            result = _run_task(function, group, rendezvous, args)
        except BaseException as error:
            error.add_note(traceback.format_exc())
            result = _portable(error)
        try:
            pipe.send(result)
        except Exception as error:  # before a byte of it: pickling comes first
            pipe.send(TypeError(f"a result that cannot be sent: {error}"))


def _portable(error: BaseException) -> BaseException:
    """An error as it arrives in another process: itself, or its text where its class cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        portable = RuntimeError(f"{type(error).__name__}: {error}")
        portable.__notes__ = error.__notes__
        return portable
    return error


def _run_task(function: Callable[..., Any], group: Group, rendezvous: Path, args: tuple[Any, ...]) -> Any:
    if group.world_size == 1:
        return function(group, *args)
    dist.init_process_group(
        "gloo",
        init_method=rendezvous.as_uri(),
        rank=group.rank,
        world_size=group.world_size,
        timeout=COLLECTIVE_TIMEOUT,
    )
    try:
        dist.barrier()  # a rank that fails at once must not do so while others still connect to it
        return function(group, *args)
    finally:
        dist.destroy_process_group()
