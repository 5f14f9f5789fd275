"""The loader processes that a test has started."""

import contextlib

import psutil


def loader_processes(parent: int | None = None) -> list[psutil.Process]:
    """Those of a process, by default of this one, that have not ended."""
    found = []
    for child in psutil.Process(parent).children():
        with contextlib.suppress(psutil.NoSuchProcess):  # or a zombie
            if "loader_server" in " ".join(child.cmdline()):
                found.append(child)
    return found
