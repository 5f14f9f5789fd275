"""The Ray that this process has started: its servers, the thread that uses it, and the end of all of them with the command.

While a thread uses Ray, the process may not shut it down.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

import psutil

from trainables.errors import ClusterError

SERVERS = ("gcs_server", "raylet")
"""The processes without which there is no Ray."""
_servers: dict[str, psutil.Process] = {}
"""Those of the Ray that this process has started, by name."""

_threads: list[threading.Thread] = []
"""Those in which a command uses Ray while its caller watches."""
_lost = threading.Event()
"""Ray has ended by itself: shutting it down would wait for it."""


class RayLostError(ClusterError):
    """The Ray that this process has started has ended before it."""


def watch_servers() -> None:
    """Remember the servers of the Ray that this process has just started, for `check_ray`."""
    _servers.update(find_servers())


def find_servers() -> dict[str, psutil.Process]:
    """This process's children that are servers of a Ray, by name; others may end at any moment."""
    children = {}
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            children[child.name()] = child
    return {name: child for name, child in children.items() if name in SERVERS}


def check_ray() -> None:
    """Notice that a server of our own Ray has ended: Ray itself waits a minute for it, and then ends this process.

    Raises:
        RayLostError: naming the process.
    """
    for name, server in _servers.items():
        try:
            lives = server.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            lives = False
        if not lives:
            _lost.set()
            raise RayLostError(f"Ray has ended: its process {name} was killed, by someone or for want of memory")


def shut_down() -> None:
    """Disconnect from Ray, and end it where this process has started it; not while a thread uses it, see `leave`."""
    import ray

    if not in_use():
        _servers.clear()
        ray.shutdown()


def start_thread(target: Callable[[], None]) -> threading.Thread:
    """Start a thread that uses Ray."""
    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    _threads[:] = [*(each for each in _threads if each.is_alive()), thread]
    return thread


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
