"""The thread in which a command uses Ray while its caller watches: whether it has ended decides how the process may end."""

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
    """Start it."""
    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    _threads[:] = [*(each for each in _threads if each.is_alive()), thread]
    return thread


def lose_ray() -> None:
    """Ray has ended by itself: whoever shut it down would wait for it."""
    _lost.set()


def goes_on() -> bool:
    """Whether Ray cannot be shut down, for a caller that was interrupted or has failed: the thread uses it, or it is lost."""
    return _lost.is_set() or any(thread.is_alive() for thread in _threads)


def leave(code: int) -> NoReturn:
    """End the process with this exit code, and a Ray of its own with it.

    Whoever uses Ray while it is shut down ends the process, at once and with code 1. So nothing of Ray is shut down while the
    thread goes on: its processes are killed, each of them stopped first, since they too notice the end of another.
    """
    if not goes_on():
        sys.exit(code)
    for again in (signal.SIGINT, signal.SIGTERM):  # between the two lines below it would leave what is stopped as it is
        signal.signal(again, signal.SIG_IGN)
    started = psutil.Process().children(recursive=True)
    for end in (psutil.Process.suspend, psutil.Process.kill):
        for process in started:
            with contextlib.suppress(psutil.NoSuchProcess):
                end(process)
    sys.stderr.flush()
    os._exit(code)
