"""A pool of processes that play the ranks of a job: real Gloo groups of any size, without Ray and with one start for many."""

from __future__ import annotations

import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainables.distributed import Group


class Ranks:
    """`run(n, function, *args)` calls `function(group, *args)` on n ranks and returns their results in rank order."""

    def __init__(self, most: int = 3):
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for _ in range(most):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, world_size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        with tempfile.TemporaryDirectory() as folder:
            for rank, pipe in enumerate(self._pipes[:world_size]):
                pipe.send((function, rank, world_size, str(Path(folder) / "store"), args))
            answers = [_received(pipe) for pipe in self._pipes[:world_size]]  # all of them, whatever one holds
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return answers

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process in self._processes:
            process.join(10)


def _received(pipe: Connection) -> Any:
    try:
        return pipe.recv()
    except Exception as error:  # an answer that cannot be unpickled, or no process any more
        return error


def _serve(pipe: Connection) -> None:
    torch.set_num_threads(1)
    while (task := pipe.recv()) is not None:
        function, rank, world_size, store, args = task
        try:
            if world_size > 1:
                dist.init_process_group(
                    "gloo", init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timedelta(seconds=60)
                )
            pipe.send(function(Group(rank, world_size, rank), *args))
        except BaseException as error:
            error.add_note(traceback.format_exc())
            pipe.send(error)
        finally:
            if world_size > 1:
                dist.destroy_process_group()
