"""The Python stacks of all threads of a process, written when another process of the node sends it a signal. Linux alone.

They are written in C and without the GIL, into memory that has a name and no file: a disk may be what hangs.
"""

import contextlib
import faulthandler
import functools
import os
import signal
import sys
from pathlib import Path

STACKS_SIGNAL = signal.SIGUSR1
_MEMORY = "raydistill stacks"


@functools.cache
def write_stacks_on_signal() -> None:
    """From now on, until the process ends. Does nothing on other systems than Linux."""
    if sys.platform == "linux":
        faulthandler.register(STACKS_SIGNAL, file=os.memfd_create(_MEMORY), all_threads=True)


class StacksRequest:
    """A process's stacks; it is sent the signal to write them when this object is created."""

    def __init__(self, pid: int) -> None:
        """Ask process `pid`.

        Raises:
            OSError: the process has died.
            LookupError: it would not write its stacks, and would end.
        """
        self._path = _memory_of(pid)
        self._begin = self._size = self._path.stat().st_size
        if not _handles_signal(pid):
            raise LookupError
        os.kill(pid, STACKS_SIGNAL)

    def grows(self) -> bool:
        """Whether more has been written since the last call, or nothing so far."""
        try:
            before, self._size = self._size, self._path.stat().st_size
        except OSError:
            return False
        return self._size == self._begin or self._size > before

    def text(self) -> str:
        """What was written so far; empty where the process has died."""
        try:
            return self._path.read_bytes()[self._begin :].decode(errors="replace")
        except OSError:
            return ""


def _memory_of(pid: int) -> Path:
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a thread closes it meanwhile
            if os.readlink(path) == f"/memfd:{_MEMORY} (deleted)":
                return path
    raise LookupError


def _handles_signal(pid: int) -> bool:
    """Whether the process has a handler for the signal, which by default would end it."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (STACKS_SIGNAL - 1) & 1)
    return False
