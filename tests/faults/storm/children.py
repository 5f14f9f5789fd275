"""Ranks of a job as processes that may die, forked from a server that has imported everything: one starts in milliseconds."""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainables.distributed.group import Group
from trainables.errors import DistillError
from trainables.failures import Failure, failure_of

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(
    # What a job imports when it first needs it takes most of its seconds.
    ["__main__", "tests.faults.storm.jobs", "torch._dynamo", "pyarrow.compute", "service.tracking.sender"]
)
PATIENCE_S = 480.0
"""For one job, which takes seconds; one that takes longer hangs."""
ORPHAN_S = 5.0
"""How long the peers of a rank that died may take to find out."""


@dataclass(frozen=True)
class Ended:
    """How a process ended: its exit code, what its function returned or why it failed."""

    code: int | None
    """None: it was still running after `PATIENCE_S`, and was killed."""
    value: Any = None
    failure: Failure | None = None
    refused: bool = False
    """Whether it failed with a `DistillError`."""
    is_orphan: bool = False
    """Whether it waited for a peer that was killed, and was killed after it, as Ray Train's controller does."""


class Job:
    """`function(group, *arguments)` in each of `world_size` processes. Use as a context; leaving it kills what is left."""

    def __init__(
        self, world_size: int, function: Callable[..., Any], *arguments: Any, environment: Mapping[str, str] | None = None
    ) -> None:
        """`environment`: further variables of the processes."""
        self._rendezvous = tempfile.TemporaryDirectory(prefix="storm-")
        self.processes, self._pipes = list[BaseProcess](), list[Connection]()
        self._results = dict[int, tuple[Any, Failure | None, bool]]()
        for rank in range(world_size):
            ours, its = CONTEXT.Pipe()
            group = Group(rank, world_size, rank)
            where = Path(self._rendezvous.name, "group")
            process = CONTEXT.Process(target=_run, args=(its, function, group, where, arguments, environment or {}), daemon=True)
            process.start()
            its.close()
            self.processes.append(process)
            self._pipes.append(ours)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        for process, pipe in zip(self.processes, self._pipes, strict=True):
            process.kill()
            process.join()
            pipe.close()
        self._rendezvous.cleanup()

    def is_running(self) -> bool:
        """Whether any of its processes is."""
        return any(process.is_alive() for process in self.processes)

    def signal(self, rank: int, number: signal.Signals) -> bool:
        """Send one; False where the process has ended."""
        process = self.processes[rank]
        if not process.is_alive() or process.pid is None:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, number)
            return True
        return False

    def end(self) -> list[Ended]:
        """Wait for all of them; how each ended, by rank."""
        deadline_s, lost_s = time.monotonic() + PATIENCE_S, math.inf
        orphans, hung = set[int](), set[int]()
        while self.is_running():
            if any(process.exitcode not in (None, 0) for process in self.processes):
                lost_s = min(lost_s, time.monotonic() + ORPHAN_S)
            if time.monotonic() > min(lost_s, deadline_s):
                running = {rank for rank, process in enumerate(self.processes) if process.is_alive()}
                orphans, hung = (running, hung) if lost_s < deadline_s else (orphans, running)
                for rank in running:
                    self.processes[rank].kill()
                    self.processes[rank].join()
            self._receive()
            time.sleep(0.005)
        self._receive()
        return [
            Ended(None if rank in hung else process.exitcode, *self._results.get(rank, (None, None, False)), rank in orphans)
            for rank, process in enumerate(self.processes)
        ]

    def _receive(self) -> None:
        for rank, pipe in enumerate(self._pipes):
            with contextlib.suppress(EOFError, ConnectionError):
                if rank not in self._results and pipe.poll():
                    self._results[rank] = pipe.recv()


def _run(
    pipe: Connection,
    function: Callable[..., Any],
    group: Group,
    rendezvous: Path,
    arguments: tuple[Any, ...],
    environment: Mapping[str, str],
) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    try:
        with _joined(group, rendezvous):
            value = function(group, *arguments)
    except Exception as error:
        pipe.send((None, failure_of(error, group.rank), isinstance(error, DistillError)))
        pipe.close()
        os._exit(2)  # without a group's own end, which may wait for a peer that is gone
    pipe.send((value, None, False))


@contextlib.contextmanager
def _joined(group: Group, rendezvous: Path) -> Any:
    if group.world_size == 1:
        yield
        return
    timeout = timedelta(seconds=60)
    dist.init_process_group(
        "gloo", init_method=rendezvous.as_uri(), rank=group.rank, world_size=group.world_size, timeout=timeout
    )
    yield
    dist.destroy_process_group()
