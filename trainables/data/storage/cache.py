"""A node's cache of data: BASE/raydistill-UID/SET/data has the files of one set, which all processes of the node share.

A file gets its name when it is whole and verified, so that a kill at any moment leaves a cache that serves again. All sets below
BASE share one budget. A set that no process uses makes room for others, and within a set the files that were used longest ago,
as far as its reader allows. `cleaner.py` removes a set that is not used any more.
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
"""How long an unused set stays: the next stage of a run, or the next trial of a sweep, takes it over."""
NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_log = logging.getLogger("raydistill")


class NoRoomError(NotRetriedError):
    """The file system that a file is written to is full."""


@contextlib.contextmanager
def no_room_if_full() -> Iterator[None]:
    """Make of an OSError of a full disk a NoRoomError."""
    try:
        yield
    except OSError as error:
        if error.errno in NO_ROOM:
            raise NoRoomError from None
        raise


@contextlib.contextmanager
def reported_as(setting: str, base: str, instead: str) -> Iterator[None]:
    """Make of an OSError the DataError of the `setting` by which `base` is used; `instead`: what to write."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{setting}: {base} cannot be used: {error.strerror or error}; {instead}") from None


class Cache:
    """The files of one set on this node, which stay until `close`. Safe across threads and processes."""

    def __init__(
        self, base: str, identity: str, *, limit_mib: int | None = None, share: float = 1.0, grace_s: float = GRACE_S
    ) -> None:
        """`limit_mib`: of all sets below `base` together; None: the `share` of what they take and what is free.

        Raises OSError where `base` cannot be used.
        """
        while True:
            self._root = user_folder(base)
            self._set = self._root / identity
            self.folder, self._room = self._set / "data", self._root / ROOM
            with contextlib.suppress(FileNotFoundError):  # others have removed the set or its root in this moment
                self._set.mkdir(mode=0o700, exist_ok=True)
                if users := try_lock(self._set / USERS, operation=fcntl.LOCK_SH):
                    os.utime(self._set / USERS)
                    self.folder.mkdir(mode=0o700, exist_ok=True)
                    break
        self._users = users
        if not is_locked(self._set / CLEANER):
            _start_cleaner(self._set, grace_s)
        for part in self._set.glob("*.part"):  # of processes that were killed
            if lock := try_lock(part, wait_s=0):
                part.unlink()
                lock.release()
        for other in self._others():
            if not is_locked(other / CLEANER):  # of a machine that died
                remove_unused(str(other))
        self.limit_bytes = limit_mib << 20 if limit_mib else int(share * (self._used_bytes() + free_bytes(self._root)))

    def close(self) -> None:
        """This process uses the set no more."""
        self._users.release()

    def has(self, name: str, num_bytes: int) -> bool:
        """Whether a file is here: it was verified before it got its name, and is still all there."""
        try:
            return os.stat(self.folder / name).st_size == num_bytes
        except FileNotFoundError:
            return False

    def num_bytes(self) -> int:
        """What the files of this set take."""
        return _num_bytes(self._set)

    def room_bytes(self) -> int:
        """What the files of this set may take, those that are here included: the budget but for other sets in use."""
        return self.limit_bytes - sum(_num_bytes(other) for other in self._others() if cleaner.is_used(str(other)))

    def bring(
        self,
        name: str,
        num_bytes: int,
        write: Callable[[Path], None],
        *,
        removable: Collection[str] = (),
        required: bool = False,
        check_stopped: Callable[[], None] = lambda: None,
    ) -> bool:
        """Have `write` fill a file, durably, unless it is here; False where it finds no room. One process writes, others wait.

        The file has its length from the beginning, which is what others count of it: `write` does not open it anew.
        `removable`: files of this set that may go. `required`: also over the budget, as long as the disk has room.

        Raises OSError, and what `write` and `check_stopped` raise, but for NoRoomError.
        """
        part, is_moved, limit_bytes = self._set / f"{name}.part", False, self.limit_bytes
        with locked(part, check_stopped):  # a lock that others get where its owner is killed
            try:
                while not (is_moved or self.has(name, num_bytes)):
                    with locked(self._room):
                        os.truncate(part, 0)  # of a process that was killed
                        if not (self._make_room(num_bytes, limit_bytes, removable) or required):
                            return False
                        with contextlib.suppress(OSError):  # then writing fails, too
                            os.truncate(part, num_bytes)  # it counts before it is there: all processes write at the same time
                    try:
                        write(part)
                        os.replace(part, self.folder / name)
                        is_moved = True
                    except NoRoomError:  # others have filled the disk
                        required, limit_bytes = False, self._used_bytes() - part.stat().st_size
                    fsync_directory(self.folder)
                return True
            finally:
                if not is_moved:  # else it may be another process's that has waited
                    part.unlink(missing_ok=True)

    def _make_room(self, num_bytes: int, limit_bytes: int, removable: Collection[str] = ()) -> bool:
        """Remove what is not needed until so many bytes fit; nothing of this set where they cannot. Callers lock ROOM."""
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
        """What all sets take."""
        return sum(map(_num_bytes, (self._set, *self._others())))

    def _others(self) -> list[Path]:
        """The other sets. Others have their folders here too."""
        return [users.parent for users in self._root.glob(f"*/{USERS}") if users.parent != self._set]


def _num_bytes(folder: Path) -> int:
    """What the files of a set take, those included that are being written."""
    total = 0
    for path in (*folder.glob("*.part"), *folder.glob("data/*")):
        with contextlib.suppress(FileNotFoundError):  # renamed or removed in this moment
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
        _log.warning("%s will stay when the job has ended: the process that removes it cannot be started: %s", folder, error)
