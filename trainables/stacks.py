"""The Python stacks of all threads of a process, written when another process of the node sends it a signal. Linux alone.

They are written in C and without the GIL, into memory that has a name and no file: a disk may be what hangs.
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
_MEMORY = "raydistill-stacks"
_WRITE_S = 1.0
"""How long processes have to write their stacks."""


class ProcessReport(NamedTuple):
    status: str
    """As `psutil` calls it, such as `sleeping`, `stopped` or `zombie`; `gone` where there is no such process."""
    stacks: str
    """The stacks of the process and of its children, such as its loader process; empty where it writes none."""


@functools.cache
def write_stacks_on_signal() -> None:
    """From now on, until the process ends. Does nothing on other systems than Linux."""
    if sys.platform == "linux":
        faulthandler.register(STACKS_SIGNAL, file=os.memfd_create(_MEMORY), all_threads=True)


def report_processes(pids: Iterable[int]) -> dict[int, ProcessReport]:
    """The state and the stacks of processes of this node, by their number."""
    signalled = {pid: _signal(pid) for pid in pids}
    time.sleep(_WRITE_S)
    return {pid: ProcessReport(status, "".join(_read(*each) for each in family)) for pid, (status, family) in signalled.items()}


def kill(pids: Iterable[int]) -> None:
    """End processes of this node, also those that are stopped or do not let go of the interpreter."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _signal(pid: int) -> tuple[str, list[tuple[int, Path, int]]]:
    """The state of a process; of it and its children those that write stacks: number, where to, and from which byte on.

    The signal ends a process that does not handle it: only one that has such memory is sent it.
    """
    family = list[tuple[int, Path, int]]()
    try:
        process = psutil.Process(pid)
        status, members = process.status(), [pid, *(child.pid for child in process.children())]
    except psutil.Error:
        return "gone", family
    for member in members:
        for path in Path(f"/proc/{member}/fd").glob("*"):
            with contextlib.suppress(OSError):  # the file was closed, or the process has ended
                if os.readlink(path) == f"/memfd:{_MEMORY} (deleted)":
                    family.append((member, path, path.stat().st_size))
                    os.kill(member, STACKS_SIGNAL)
    return status, family


def _read(pid: int, path: Path, begin: int) -> str:
    with contextlib.suppress(OSError):  # the process has ended
        if text := path.read_bytes()[begin:].decode(errors="replace"):
            return f"process {pid}:\n{text}"
    return ""
