"""A node's cache of data: BASE/raydistill-UID/SET/data has the files of one set, shared by all processes of the node.

A file gets its name only once it is complete and verified, so that a kill at any moment leaves a usable cache. All sets below
BASE share one budget. To make room, sets in use by no process are removed, and within a set the least recently used files that
its reader can spare. `cleaner.py` removes a set once it is unused.
"""

import contextlib
import errno
import fcntl
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from trainables.data.storage import cleaner
from trainables.data.storage.cleaner import CLEANER, ROOM, USERS, remove_unused
from trainables.data.storage.free_space import free_bytes
from trainables.errors import DataError
from trainables.locks import is_locked, locked, try_lock
from trainables.object_store.retries import NotRetriedError
from trainables.rundir import fsync_directory
from trainables.user_folder import user_folder

GRACE_S = 60.0
"""How long an unused set is kept for the next stage of a run, or the next trial of a sweep."""
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_log = logging.getLogger("raydistill")


class DiskFullError(NotRetriedError):
    """The file system that a file is written to is full."""


@contextlib.contextmanager
def detect_full_disk() -> Iterator[None]:
    """Turn an OSError of a full disk into a DiskFullError."""
    try:
        yield
    except OSError as error:
        if error.errno in DISK_FULL:
            raise DiskFullError from None
        raise


@contextlib.contextmanager
def reported_as(setting: str, base: str, instead: str) -> Iterator[None]:
    """Turn an OSError into a DataError of the `setting` that names `base`; `instead` says what to write."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{setting}: {base} cannot be used: {error.strerror or error}; {instead}") from None


class Cache:
    """The files of one set on this node, kept until `close`. Thread- and process-safe."""

    def __init__(
        self, base: str, identity: str, *, limit_mib: int | None = None, share: float = 1.0, grace_s: float = GRACE_S
    ) -> None:
        """`limit_mib` limits all sets below `base` together; None: to the `share` of the space that they use or that is free.

        Raises OSError if `base` cannot be used.
        """
        while True:
            self._root = user_folder(base)
            self._set = self._root / identity
            self.folder, self._room = self._set / "data", self._root / ROOM
            with contextlib.suppress(FileNotFoundError):  # raced with the removal of the set or its root
                self._set.mkdir(mode=0o700, exist_ok=True)
                if users := try_lock(self._set / USERS, operation=fcntl.LOCK_SH):
                    os.utime(self._set / USERS)
                    self.folder.mkdir(mode=0o700, exist_ok=True)
                    break
        self._users = users
        if not is_locked(self._set / CLEANER):
            _start_cleaner(self._set, grace_s)
        for part in self._set.glob("*.part"):  # left by killed processes
            if lock := try_lock(part, wait_s=0):
                part.unlink()
                lock.release()
        for other in self._others():
            if not is_locked(other / CLEANER):  # left by a machine crash
                remove_unused(str(other))
        self.limit_bytes = limit_mib << 20 if limit_mib else int(share * (self._used_bytes() + free_bytes(self._root)))

    def close(self) -> None:
        """Release the set: this process no longer uses it."""
        self._users.release()

    def has(self, name: str, num_bytes: int) -> bool:
        """Whether a file is in the cache with this size; it was verified before it got its name."""
        try:
            return os.stat(self.folder / name).st_size == num_bytes
        except FileNotFoundError:
            return False

    def num_bytes(self) -> int:
        """Return the total size of this set's files."""
        return _num_bytes(self._set)

    def room_bytes(self) -> int:
        """Return the total size that this set's files may reach: the budget minus other sets in use."""
        return self.limit_bytes - sum(_num_bytes(other) for other in self._others() if cleaner.is_used(str(other)))

    def ensure(
        self,
        name: str,
        num_bytes: int,
        write: Callable[[Path], None],
        *,
        removable: Collection[str] = (),
        required: bool = False,
        check_stopped: Callable[[], None] = lambda: None,
    ) -> bool:
        """Unless the file is in the cache, let `write` fill it durably; False if there is no room. Other processes wait.

        The file has its full length from the start, since other processes count it: `write` must not truncate it.
        `removable` are files of this set that may be removed. `required` may exceed the budget while the disk has room.

        Raises OSError, and what `write` and `check_stopped` raise except DiskFullError.
        """
        part, is_moved, limit_bytes = self._set / f"{name}.part", False, self.limit_bytes
        with locked(part, check_stopped):  # the lock is released if its owner is killed
            try:
                while not (is_moved or self.has(name, num_bytes)):
                    with locked(self._room):
                        os.truncate(part, 0)  # discard what a killed process left
                        if not (self._make_room(num_bytes, limit_bytes, removable) or required):
                            return False
                        with contextlib.suppress(OSError):  # writing will fail too
                            os.truncate(part, num_bytes)  # reserves the space: several processes write at the same time
                    try:
                        write(part)
                        os.replace(part, self.folder / name)
                        is_moved = True
                    except DiskFullError:  # others have filled the disk
                        required, limit_bytes = False, self._used_bytes() - part.stat().st_size
                    fsync_directory(self.folder)
                return True
            finally:
                if not is_moved:  # otherwise the name may belong to a process that waited
                    part.unlink(missing_ok=True)

    def _make_room(self, num_bytes: int, limit_bytes: int, removable: Collection[str] = ()) -> bool:
        """Remove unneeded files until `num_bytes` fit; if they cannot, keep this set's files. Callers lock ROOM."""
        if self._used_bytes() + num_bytes <= limit_bytes:
            return True
        for other in self._others():
            remove_unused(str(other))
        over_bytes = self._used_bytes() + num_bytes - limit_bytes
        files = [(path, path.stat()) for name in removable if (path := self.folder / name).exists()]
        if over_bytes > sum(stat.st_size for _, stat in files):
            return False
        for path, stat in sorted(files, key=lambda each: each[1].st_mtime_ns):
            if over_bytes <= 0:
                break
            path.unlink()
            over_bytes -= stat.st_size
        return True

    def _used_bytes(self) -> int:
        """Return the total size of all sets."""
        return sum(map(_num_bytes, (self._set, *self._others())))

    def _others(self) -> list[Path]:
        """List the folders of other sets; the root may contain unrelated folders."""
        return [users.parent for users in self._root.glob(f"*/{USERS}") if users.parent != self._set]


def _num_bytes(folder: Path) -> int:
    """Return the total size of a set's files, including those being written."""
    total = 0
    for path in (*folder.glob("*.part"), *folder.glob("data/*")):
        with contextlib.suppress(FileNotFoundError):  # raced with a rename or removal
            total += path.stat().st_size
    return total


def _start_cleaner(folder: Path, grace_s: float) -> None:
    command = [sys.executable, "-S", "-m", cleaner.__name__, str(folder), str(grace_s)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(os.path.abspath(path) for path in sys.path)}
    silent = subprocess.DEVNULL
    try:
        subprocess.run(
            command, check=True, start_new_session=True, cwd="/", env=environment, stdin=silent, stdout=silent, stderr=silent
        )
    except (OSError, subprocess.CalledProcessError) as error:
        _log.warning("%s will not be removed after the job: its cleaner process cannot be started: %s", folder, error)
