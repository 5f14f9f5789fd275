"""The Ray that this process has started: its servers, and the notice that one of them has ended."""

from __future__ import annotations

import contextlib

import psutil

from service.cluster import ray_thread
from trainables.errors import ClusterError

SERVERS = ("gcs_server", "raylet")
"""The processes without which there is no Ray."""
_servers: dict[str, psutil.Process] = {}
"""Those of the Ray that this process has started, by name."""


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
            ray_thread.mark_ray_lost()
            raise RayLostError(f"Ray has ended: its process {name} was killed, by someone or for want of memory")


def shut_down() -> None:
    """Disconnect from Ray, and end it where this process has started it; not while a thread uses it, see `ray_thread.leave`."""
    import ray

    if not ray_thread.in_use():
        _servers.clear()
        ray.shutdown()
