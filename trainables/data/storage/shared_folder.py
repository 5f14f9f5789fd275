"""A folder that all processes of a node share: BASE/raydistill-UID/IDENTITY, there as long as somebody holds it.

What it holds is named by its identity, so that a folder left by an earlier job, or by a job that died, serves again.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import shutil
import stat
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from trainables.data.storage import folder_cleaner as keeper
from trainables.errors import DataError
from trainables.rundir import expand_home

RAM = "/dev/shm"
GRACE_S = 60.0
"""How long an unused folder stays: the next stage of a run, or the next trial of a sweep, takes it over."""
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_SHORTEST_POLL_S, _LONGEST_POLL_S = 0.002, 0.2
_log = logging.getLogger("raydistill")
_MEMORY_SHARE = 0.9  # of the free memory: the rest is for the job itself


class Hold:
    """This process's share in a folder: while it is open, nobody removes the folder."""

    def __init__(self, folder: Path, handle: int) -> None:
        self.folder = folder
        self._close = weakref.finalize(self, os.close, handle)

    def close(self) -> None:
        """Let go. The process's end does the same, and so does losing the last reference."""
        self._close()


def hold(base: str, identity: str, *, grace_s: float = GRACE_S) -> Hold:
    """Make or take over the folder of `identity`, and see to its removal `grace_s` seconds after its last user has gone.

    Folders of other identities that a crash left behind are removed. Raises OSError where `base` cannot be used; see `usable`.
    """
    while True:
        folder = _own_root(base) / identity
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            handle = os.open(folder / keeper.USERS, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:  # the keeper of the root's last folder has removed it in this moment
            continue
        held = Hold(folder, handle)
        fcntl.flock(handle, fcntl.LOCK_SH)  # some network file systems have none: OSError
        if keeper.is_at(handle, str(folder / keeper.USERS)):
            break
        held.close()
    os.utime(handle)
    if not keeper.is_kept(str(folder)):
        _start_keeper(folder, grace_s)
    remove_others(held, kept=False)
    return held


@contextlib.contextmanager
def usable(setting: str, base: str, instead: str) -> Iterator[None]:
    """Make of an OSError the DataError of the `setting` by which `base` is used; `instead`: what to write."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{setting}: {base} cannot be used: {error.strerror or error}; {instead}") from None


def _start_keeper(folder: Path, grace_s: float) -> None:
    command = [sys.executable, "-I", "-S", keeper.__file__, str(folder), str(grace_s)]
    silent = subprocess.DEVNULL
    try:
        subprocess.run(command, check=True, start_new_session=True, cwd="/", stdin=silent, stdout=silent, stderr=silent)
    except (OSError, subprocess.CalledProcessError) as error:
        _log.warning("%s will stay when the job has ended, for want of a process to remove it: %s", folder, error)


def remove_others(held: Hold, *, kept: bool) -> None:
    """Remove the folders beside it that nobody uses; with `kept` also those whose time of grace still runs."""
    for other in held.folder.parent.iterdir():
        if keeper.GONE in other.name:
            shutil.rmtree(other, ignore_errors=True)
        elif other != held.folder and (kept or not keeper.is_kept(str(other))):
            keeper.remove_unused(str(other))


@contextlib.contextmanager
def alone(path: Path, waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold the exclusive lock of the file `path`, across the node's processes; `waiting` is called every so often till then."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        pause_s = _SHORTEST_POLL_S
        while not keeper.try_lock(handle):
            waiting()
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LONGEST_POLL_S)
        yield
    finally:
        os.close(handle)


def free_bytes(folder: Path) -> int:
    """What can still be written below `folder`; in memory no more than the machine, or the container, has to give."""
    disk = os.statvfs(folder)
    free = disk.f_bavail * disk.f_frsize
    if str(folder).startswith(RAM):
        free = min(free, int(_MEMORY_SHARE * min(psutil.virtual_memory().available, _container_bytes())))
    return free


def folder_bytes(folder: Path) -> int:
    """The size of the files in `folder`, from which others may be renamed or removed meanwhile."""
    num_bytes = 0
    with os.scandir(folder) as entries:
        for entry in entries:
            with contextlib.suppress(FileNotFoundError):
                num_bytes += entry.stat().st_size
    return num_bytes


def _container_bytes() -> float:
    """Memory that the control group of this process (version 2) may still take; what the kernel can reclaim counts as free."""
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = (group / "memory.max").read_text().strip(), int((group / "memory.current").read_text())
        reclaimable = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())["inactive_file"]
    except (OSError, KeyError, ValueError):
        return float("inf")
    return float("inf") if limit == "max" else int(limit) - used + int(reclaimable)


def human(num_bytes: float) -> str:
    """A size as a message shows it: three digits and a binary unit."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} TiB"


def _own_root(base: str) -> Path:
    """BASE/raydistill-UID, which belongs to this user alone: /dev/shm is everybody's. Raises OSError."""
    root = expand_home(base) / f"raydistill-{os.getuid()}"
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):  # removed in this moment, with its last folder
        found = root.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise PermissionError(errno.EPERM, f"{root} is not a folder of this user: remove it")
    return root
