"""The Ray that this process has started: its servers, the threads that use it, and the end of all with the command.

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
from trainables.process_exit import skip_exit_handlers

SERVERS = ("gcs_server", "raylet")
"""The processes without which there is no Ray."""
_servers: dict[str, psutil.Process] = {}
"""Those of the Ray that this process has started, by name."""
_threads: list[threading.Thread] = []
"""Those in which a command uses Ray while its caller watches."""


class RayLostError(ClusterError):
    """The Ray that this process has started has ended before it."""


def watch_servers() -> None:
    """From now on `check_ray` and `is_lost` know of the servers that are this process's children."""
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # another child, which may end at any moment
            if (name := child.name()) in SERVERS:
                _servers[name] = child


def check_ray() -> None:
    """Notice that a server of our own Ray has ended: Ray itself waits a minute for it, and then ends this process.

    Raises RayLostError: naming the process.
    """
    if name := _dead_server():
        raise RayLostError(f"Ray has ended: its process {name} was killed or failed, perhaps out of memory")


def is_lost() -> bool:
    """Whether the Ray that this process has started has ended before it."""
    return _dead_server() is not None


def _dead_server() -> str | None:
    for name, server in _servers.items():
        try:
            if server.status() == psutil.STATUS_ZOMBIE:
                return name
        except psutil.NoSuchProcess:
            return name
    return None


def shut_down() -> None:
    """Disconnect from Ray, and end it where this process has started it; not while a thread uses it, see `exit_process`."""
    import ray

    if not in_use():
        _servers.clear()
        ray.shutdown()


def start_thread(target: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    _threads[:] = [*(each for each in _threads if each.is_alive()), thread]
    return thread


def in_use() -> bool:
    """Whether Ray cannot be shut down, for a caller that was interrupted or has failed: a thread uses it, or it is lost."""
    return is_lost() or any(thread.is_alive() for thread in _threads)


def exit_process(code: int) -> NoReturn:
    """End the process with this exit code, and a Ray of its own with it.

    A process that uses Ray while it is shut down ends at once, with code 1. So nothing of Ray is shut down while the
    thread runs: its processes are killed, each of them stopped first, since they too notice the end of another.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the command has its result, which a signal meanwhile must not change
    if not in_use():
        skip_exit_handlers()
        sys.exit(code)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # between stopping and killing it would leave the processes stopped
    children = psutil.Process().children(recursive=True)
    for end in (psutil.Process.suspend, psutil.Process.kill):
        for process in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                end(process)
    sys.stderr.flush()
    os._exit(code)
