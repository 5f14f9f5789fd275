"""The thread in which a command uses Ray while its caller watches: while it runs, the process may not shut Ray down."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

import psutil

_threads: list[threading.Thread] = []
_lost = threading.Event()


def begin(target: Callable[[], None]) -> threading.Thread:
    """Start the thread."""
    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    _threads[:] = [*(each for each in _threads if each.is_alive()), thread]
    return thread


def mark_ray_lost() -> None:
    """Ray has ended by itself: shutting it down would wait for it."""
    _lost.set()


def in_use() -> bool:
    """Whether Ray cannot be shut down, for a caller that was interrupted or has failed: a thread uses it, or it is lost."""
    return _lost.is_set() or any(thread.is_alive() for thread in _threads)


def leave(code: int) -> NoReturn:
    """End the process with this exit code, and a Ray of its own with it.

    A process that uses Ray while it is shut down ends at once, with code 1. So nothing of Ray is shut down while the
    thread runs: its processes are killed, each of them stopped first, since they too notice the end of another.
    """
    if not in_use():
        sys.exit(code)
    for number in (signal.SIGINT, signal.SIGTERM):  # between stopping and killing it would leave the processes stopped
        signal.signal(number, signal.SIG_IGN)
    children = psutil.Process().children(recursive=True)
    for end in (psutil.Process.suspend, psutil.Process.kill):
        for process in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                end(process)
    sys.stderr.flush()
    os._exit(code)
