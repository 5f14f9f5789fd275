"""A folder that all processes of a node share: BASE/raydistill-UID/IDENTITY, there as long as a process has a lease of it.

Its content is named by its identity, so that a folder left by an earlier job, or by a job that died, serves again.
"""

import contextlib
import errno
import logging
import os
import shutil
import subprocess
import sys
import uuid
import weakref
from collections.abc import Iterator
from pathlib import Path

import psutil

from trainables.data.storage import folder_cleaner
from trainables.errors import DataError
from trainables.locks import Lock, locked, try_lock
from trainables.user_folder import user_folder

RAM = "/dev/shm"
GRACE_S = 60.0
"""How long an unused folder stays: the next stage of a run, or the next trial of a sweep, takes it over."""
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_log = logging.getLogger("raydistill")
_MEMORY_SHARE = 0.9  # of the free memory: the rest is for the job itself


class FolderLease:
    """This process's use of a folder: until it is closed, nobody removes the folder."""

    def __init__(self, folder: Path, user: Path, lock: Lock) -> None:
        self.folder = folder
        self._close = weakref.finalize(self, _end_lease, user, lock)

    def close(self) -> None:
        """End the use. The process's end does the same, and so does losing the last reference."""
        self._close()


def _end_lease(user: Path, lock: Lock) -> None:
    user.unlink(missing_ok=True)
    lock.release()


def lease_folder(base: str, identity: str, *, grace_s: float = GRACE_S) -> FolderLease:
    """Make or take over the folder of `identity`, and see to its removal `grace_s` seconds after its last user has gone.

    Folders of other identities that a crash left behind are removed. Raises OSError where `base` cannot be used.
    """
    found = None
    while found is None:
        folder = user_folder(base) / identity
        with contextlib.suppress(FileNotFoundError):  # another process has removed the folder or its root in this moment
            folder.mkdir(mode=0o700, exist_ok=True)
            found = _register(folder, grace_s)
    remove_others(found, within_grace=False)
    return found


def _register(folder: Path, grace_s: float) -> FolderLease | None:
    """A lease of `folder`, and a process that removes it. Raises FileNotFoundError where the folder is gone."""
    with locked(folder / folder_cleaner.REGISTRY):
        user = folder / folder_cleaner.USERS / uuid.uuid4().hex
        user.parent.mkdir(mode=0o700, exist_ok=True)
        lock = try_lock(user)
        if lock is None:
            return None
        if not folder_cleaner.is_watched(str(folder)):
            _start_cleaner(folder, grace_s)
        return FolderLease(folder, user, lock)


@contextlib.contextmanager
def reported_as(setting: str, base: str, instead: str) -> Iterator[None]:
    """Make of an OSError the DataError of the `setting` by which `base` is used; `instead`: what to write."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{setting}: {base} cannot be used: {error.strerror or error}; {instead}") from None


def _start_cleaner(folder: Path, grace_s: float) -> None:
    command = [sys.executable, "-S", "-m", folder_cleaner.__name__, str(folder), str(grace_s)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path)}
    silent = subprocess.DEVNULL
    try:
        subprocess.run(
            command, check=True, start_new_session=True, cwd="/", env=environment, stdin=silent, stdout=silent, stderr=silent
        )
    except (OSError, subprocess.CalledProcessError) as error:
        _log.warning("%s will stay when the job has ended: the process that removes it cannot be started: %s", folder, error)


def remove_others(own: FolderLease, *, within_grace: bool) -> None:
    """Remove the other folders of its root that nobody uses; `within_grace`: also those that a process will remove soon."""
    for other in own.folder.parent.iterdir():
        if folder_cleaner.REMOVED in other.name:
            shutil.rmtree(other, ignore_errors=True)
        elif other != own.folder and (within_grace or not folder_cleaner.is_watched(str(other))):
            folder_cleaner.remove_unused(str(other))


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


def _container_bytes(memberships: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> float:
    """Memory that this process may still take by its control group and those above it, of version 1 or 2 of control groups.

    A container may see the path that its group has on the machine, and only its own group as the root.
    """
    free = float("inf")
    with contextlib.suppress(OSError):
        for line in memberships.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers:
                top, limit, used, reclaimable = root, "memory.max", "memory.current", "inactive_file"
            elif "memory" in controllers.split(","):
                top, limit, used = root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
                reclaimable = "total_inactive_file"
            else:
                continue
            own = top.joinpath(*(part for part in path.split("/") if part not in ("", "..")))
            for group in (own, *own.parents[: len(own.parts) - len(top.parts)]):
                free = min(free, _group_bytes(group, limit, used, reclaimable))
    return free


def _group_bytes(group: Path, limit: str, used: str, reclaimable: str) -> float:
    """What one control group may still take, by its files of these names; what the kernel can reclaim counts as free."""
    try:
        if (limit_bytes := (group / limit).read_text().strip()) == "max":
            return float("inf")
        counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return int(limit_bytes) - int((group / used).read_text()) + int(counts[reclaimable])
    except (OSError, KeyError, ValueError):
        return float("inf")


def format_bytes(num_bytes: float) -> str:
    """A size as a message shows it: three digits and a binary unit."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} TiB"
