"""Dump the Python stacks of all threads of a process when another process of the node sends it a signal. Linux only.

faulthandler writes them without the GIL into a memfd, because a disk may be what hangs.
"""

import contextlib
import faulthandler
import functools
import os
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import psutil

STACKS_SIGNAL = signal.SIGUSR1
_MEMFD_NAME = "raydistill-stacks"
_WRITE_S = 1.0
"""Time for processes to write their stacks."""


class ProcessReport(NamedTuple):
    status: str
    """psutil's status, such as `sleeping`, `stopped` or `zombie`; `gone` if there is no such process."""
    stacks: str
    """The stacks of the process and its children, such as its loader process; empty if it wrote none."""


@functools.cache
def write_stacks_on_signal() -> None:
    """Make this process dump its stacks on `STACKS_SIGNAL`. Does nothing on systems other than Linux."""
    if sys.platform == "linux":
        faulthandler.register(STACKS_SIGNAL, file=os.memfd_create(_MEMFD_NAME), all_threads=True)


def report_processes(pids: Iterable[int]) -> dict[int, ProcessReport]:
    """Return the status and stacks of processes of this node, by PID."""
    signalled = {pid: _signal(pid) for pid in pids}
    time.sleep(_WRITE_S)
    return {pid: ProcessReport(status, "".join(_read(*each) for each in family)) for pid, (status, family) in signalled.items()}


def kill(pids: Iterable[int]) -> None:
    """Kill processes of this node, even stopped ones and those that hold the GIL."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _signal(pid: int) -> tuple[str, list[tuple[int, Path, int]]]:
    """Signal a process and its children. Returns its status, and (PID, memfd path, byte offset) of each that dumps stacks.

    The signal would kill a process without a handler, so it is sent only to processes with the memfd.
    """
    family = list[tuple[int, Path, int]]()
    try:
        process = psutil.Process(pid)
        status, members = process.status(), [pid, *(child.pid for child in process.children())]
    except psutil.Error:
        return "gone", family
    for member in members:
        for path in Path(f"/proc/{member}/fd").glob("*"):
            with contextlib.suppress(OSError):  # the file was closed or the process ended
                if os.readlink(path) == f"/memfd:{_MEMFD_NAME} (deleted)":
                    family.append((member, path, path.stat().st_size))
                    os.kill(member, STACKS_SIGNAL)
    return status, family


def _read(pid: int, path: Path, begin: int) -> str:
    with contextlib.suppress(OSError):  # the process ended
        if text := path.read_bytes()[begin:].decode(errors="replace"):
            return f"process {pid}:\n{text}"
    return ""
