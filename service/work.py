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

_NAME = "work"


def begin(target: Callable[[], None]) -> threading.Thread:
    """Start it."""
    thread = threading.Thread(target=target, name=_NAME, daemon=True)
    thread.start()
    return thread


def goes_on() -> bool:
    """Whether it still works, for a caller that was interrupted or has failed."""
    return any(thread.name == _NAME for thread in threading.enumerate())


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
