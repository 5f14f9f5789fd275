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
    families = {pid: _family(pid) for pid in pids}
    written = {child: _request_stacks(child) for family in families.values() for child in family}
    time.sleep(_WRITE_S)
    stacks = {child: f"process {child}:\n{text}" for child, where in written.items() if (text := _read(*where))}
    return {
        pid: ProcessReport(_status(pid), "".join(stacks.get(each, "") for each in family)) for pid, family in families.items()
    }


def kill(pids: Iterable[int]) -> None:
    """End processes of this node, also those that are stopped or do not let go of the interpreter."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _family(pid: int) -> list[int]:
    with contextlib.suppress(psutil.Error):
        return [pid, *(child.pid for child in psutil.Process(pid).children())]
    return []


def _status(pid: int) -> str:
    with contextlib.suppress(psutil.Error):
        return str(psutil.Process(pid).status())
    return "gone"


def _request_stacks(pid: int) -> tuple[Path, int]:
    """Where a process writes its stacks, and from which byte on; it is sent the signal only where it has such memory."""
    for path in Path(f"/proc/{pid}/fd").glob("*"):
        with contextlib.suppress(OSError):  # the file was closed, or the process has ended
            if os.readlink(path) == f"/memfd:{_MEMORY} (deleted)":
                size = path.stat().st_size
                os.kill(pid, STACKS_SIGNAL)
                return path, size
    return Path(os.devnull), 0


def _read(path: Path, begin: int) -> str:
    with contextlib.suppress(OSError):  # the process has ended
        return path.read_bytes()[begin:].decode(errors="replace")
    return ""
