"""The Ray that this process has started: its servers, the threads that watch and use it, and the end of all with the command.

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
GRACE_S = 5.0
"""How long a caller has to find out by itself that a server has ended."""
_servers: dict[str, psutil.Process] = {}
"""Those of the Ray that this process has started, by name."""
_watches: list[tuple[threading.Thread, threading.Event]] = []
"""The thread that watches them, and what ends it."""
_noticed = threading.Event()
"""The caller has found out."""
_threads: list[threading.Thread] = []
"""Those in which a command uses Ray while its caller watches."""


class RayLostError(ClusterError):
    """The Ray that this process has started has ended before it."""


def watch_servers() -> None:
    """Watch the servers of the Ray that this process is about to start, until `shut_down`.

    For a caller that is inside Ray when one of them ends: Ray waits a minute for it, and then ends this process. After
    `GRACE_S` the watch ends it, with one line.
    """
    _noticed.clear()
    _servers.clear()  # of a Ray that failed to start
    stop = threading.Event()
    thread = threading.Thread(target=_watch, args=(stop,), daemon=True)
    thread.start()
    _watches.append((thread, stop))


def _watch(stop: threading.Event) -> None:
    while not stop.wait(0.5):
        if len(_servers) < len(SERVERS):
            _servers.update(find_servers())
        if name := _dead_server():
            if not _noticed.wait(GRACE_S):
                print(f"error: {_lost(name)}; repeat the command, or `distill resume` its run", file=sys.stderr)
                _end_process(2)
            return


def find_servers() -> dict[str, psutil.Process]:
    """This process's children that are servers of a Ray, by name; others may end at any moment."""
    children = {}
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            children[child.name()] = child
    return {name: child for name, child in children.items() if name in SERVERS}


def check_ray() -> None:
    """Notice that a server of our own Ray has ended: Ray itself waits a minute for it, and then ends this process.

    Raises RayLostError: naming the process.
    """
    if name := _dead_server():
        _noticed.set()
        raise _lost(name)


def _dead_server() -> str | None:
    for name, server in list(_servers.items()):
        try:
            if server.status() == psutil.STATUS_ZOMBIE:
                return name
        except psutil.NoSuchProcess:
            return name
    return None


def _lost(server: str) -> RayLostError:
    return RayLostError(f"Ray has ended: its process {server} was killed or failed, perhaps out of memory")


def shut_down() -> None:
    """Disconnect from Ray, and end it where this process has started it; not while a thread uses it, see `exit_process`."""
    import ray

    if not in_use():
        end_watch()
        _servers.clear()
        ray.shutdown()


def end_watch() -> None:
    """From here on whoever uses Ray finds out by himself."""
    _noticed.set()
    while _watches:
        thread, stop = _watches.pop()
        stop.set()
        thread.join()


def start_thread(target: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=target, daemon=True)
    thread.start()
    _threads[:] = [*(each for each in _threads if each.is_alive()), thread]
    return thread


def in_use() -> bool:
    """Whether Ray cannot be shut down, for a caller that was interrupted or has failed: a thread uses it, or it is lost."""
    return is_lost() or any(thread.is_alive() for thread in _threads)


def is_lost() -> bool:
    """Whether the Ray that this process has started has ended before it."""
    found = _dead_server() is not None
    if found:
        _noticed.set()
    return found


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
    _end_process(code)


def _end_process(code: int) -> NoReturn:
    children = psutil.Process().children(recursive=True)
    for end in (psutil.Process.suspend, psutil.Process.kill):
        for process in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                end(process)
    sys.stderr.flush()
    os._exit(code)
