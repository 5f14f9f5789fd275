"""The local Ray that this process has started: its servers, the threads that use it, and its shutdown.

While a thread uses Ray, the process must not shut it down.
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
"""The processes that Ray cannot run without."""
_servers: dict[str, psutil.Process] = {}
"""Server processes of the local Ray, by name."""
_threads: list[threading.Thread] = []
"""Threads that may be using Ray."""
_interrupted = threading.Event()
"""Set once this process is interrupted, see `interrupt`."""


class RayLostError(ClusterError):
    """The local Ray has ended before this process."""


def watch_servers() -> None:
    """Let `check_ray` and `is_lost` watch the servers among this process's children."""
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):  # another child may end at any time
            if (name := child.name()) in SERVERS:
                _servers[name] = child


def check_ray() -> None:
    """Raise RayLostError if a server of the local Ray has ended; Ray itself waits a minute and then ends this process."""
    if name := _dead_server():
        raise RayLostError(f"Ray has ended: its process {name} was killed or failed, perhaps out of memory")


def is_lost() -> bool:
    """Whether the local Ray has ended before this process."""
    return _dead_server() is not None


def _dead_server() -> str | None:
    for name, server in _servers.items():
        try:
            if server.status() == psutil.STATUS_ZOMBIE:
                return name
        except psutil.NoSuchProcess:
            return name
    return None


def interrupt() -> None:
    """Let Ray end with this process, which is about to end, instead of shutting it down before.

    Twice in 98 faults of a storm an interrupted driver crashed after its session's end was in the log, in or after Ray's own
    shutdown (2.60), while workers were restarted.
    """
    _interrupted.set()


def shut_down() -> None:
    """Disconnect from Ray, and stop a local one. Does nothing while a thread uses Ray, see `exit_process`."""
    import ray

    if not in_use():
        _servers.clear()
        ray.shutdown()
        # Ray's C++ part leaves the system's default, which would end this process at once; Python does not notice.
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))


def start_thread(target: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    _threads[:] = [*(each for each in _threads if each.is_alive()), thread]
    return thread


def in_use() -> bool:
    """Whether Ray cannot be shut down because a thread uses it, it is lost or this process is interrupted."""
    return _interrupted.is_set() or is_lost() or any(thread.is_alive() for thread in _threads)


def exit_process(code: int) -> NoReturn:
    """End the process with this exit code, together with its local Ray.

    Shutting down Ray while a thread uses it would end the process at once with code 1. Then Ray's processes are killed instead,
    after all are suspended, since each would react to the end of another.
    """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the exit code is final
    if not in_use():
        skip_exit_handlers()
        sys.exit(code)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it could leave the processes suspended
    suspended = set[psutil.Process]()
    while new := set(psutil.Process().children(recursive=True)) - suspended:  # one may start another until it is suspended
        for process in new:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()
        suspended |= new
    for process in suspended:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    sys.stderr.flush()
    os._exit(code)
