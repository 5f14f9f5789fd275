"""A pool of processes that play the ranks of a job: real Gloo groups of any size, without Ray and with one start for many."""

from __future__ import annotations

import itertools
import multiprocessing
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

PATIENCE = timedelta(seconds=60)  # of a rank whose peers do not come


class RankDiedError(RuntimeError):
    """The process of a rank ended during a run."""


class RankPool:
    """`run(n, function, *args)` calls `function(group, *args)` on n ranks and returns their results in rank order."""

    def __init__(self, most: int = 3):
        self._most = most
        self._runs = itertools.count()
        # Ranks meet in a file. It outlives them all: a group that is collected late and finds no file ends its process.
        self._meetings = tempfile.TemporaryDirectory(prefix="ranks-")
        self._start()

    def run(self, world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Raises `RankDiedError`, or what a rank raised with the rank's stack as a note; the pool may be used again whatever happened."""
        meeting = Path(self._meetings.name, str(next(self._runs)))
        answers: dict[int, Any] = {}
        try:
            for rank, pipe in enumerate(self._pipes[:world_size]):
                _send(pipe, rank, (function, Group(rank, world_size, rank), meeting, args))
            while len(answers) < world_size:  # all of them, whatever one holds
                waiting = {pipe: rank for rank, pipe in enumerate(self._pipes[:world_size]) if rank not in answers}
                for ready in wait(list(waiting)):
                    rank = waiting[cast(Connection, ready)]
                    answers[rank] = _received(self._pipes[rank], rank)
        except RankDiedError:  # the others may wait for it for a minute
            for process in self._processes:
                process.kill()
            self._end()
            self._start()
            raise
        for _, answer in sorted(answers.items()):
            if isinstance(answer, BaseException):
                raise answer
        return [answers[rank] for rank in range(world_size)]

    def close(self) -> None:
        self._end()
        self._meetings.cleanup()

    def _end(self) -> None:
        for pipe in self._pipes:
            pipe.close()  # a rank that waits for its next task reads the end of its pipe
        for process in self._processes:
            process.join(10)
            process.kill()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for _ in range(self._most):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)


def _send(pipe: Connection, rank: int, task: tuple[Any, ...]) -> None:
    try:
        pipe.send(task)
    except OSError as error:
        raise RankDiedError(f"rank {rank} ended before this run") from error


def _received(pipe: Connection, rank: int) -> Any:
    try:
        return pipe.recv()
    except (EOFError, OSError) as error:
        raise RankDiedError(f"rank {rank} ended without an answer") from error
    except Exception as error:  # an answer that cannot be unpickled
        return error


def _serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            function, group, meeting, args = pipe.recv()
        except EOFError:  # the pool is closed
            return
        try:
            answer = _answer(function, group, meeting, args)
        except BaseException as error:
            error.add_note(traceback.format_exc())
            answer = error
        pipe.send(answer)


def _answer(function: Callable[..., Any], group: Group, meeting: Path, args: tuple[Any, ...]) -> Any:
    if group.world_size == 1:
        return function(group, *args)
    dist.init_process_group("gloo", init_method=meeting.as_uri(), rank=group.rank, world_size=group.world_size, timeout=PATIENCE)
    try:
        dist.barrier()  # a rank that fails at once must not do so while others still connect to it
        return function(group, *args)
    finally:
        dist.destroy_process_group()
