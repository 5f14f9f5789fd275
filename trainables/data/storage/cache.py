"""A node's cache of data: BASE/raydistill-UID/SET/data has the files of one set, which all processes of the node share.

A file gets its name when it is whole and verified, so that a kill at any moment leaves a cache that serves again. All sets below
BASE share one budget. A set that no process uses makes room for others, and within a set the files that were used longest ago,
as far as its reader allows. `cleaner.py` removes a set that is not used any more.
"""

import contextlib
import errno
import fcntl
import logging
import mmap
import os
import subprocess
import sys
import threading
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

SIZE = "size"
GRACE_S = 60.0
"""How long an unused set stays: the next stage of a run, or the next trial of a sweep, takes it over."""
_GRANT = 8 << 20
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
            self.folder, self._size, self._room = self._set / "data", self._set / SIZE, str(self._root / ROOM)
            with contextlib.suppress(FileNotFoundError):  # others have removed the set or its root in this moment
                self._set.mkdir(mode=0o700, exist_ok=True)
                if alone := try_lock(self._set / USERS, wait_s=0):
                    self._recount()
                    alone.release()
                if users := try_lock(self._set / USERS, operation=fcntl.LOCK_SH):
                    os.utime(self._set / USERS)
                    self.folder.mkdir(mode=0o700, exist_ok=True)
                    break
        self._users = users
        if not is_locked(self._set / CLEANER):
            _start_cleaner(self._set, grace_s)
        self._granting, self._granted_bytes = threading.Lock(), 0
        for part in self._set.glob("*.part"):  # of processes that were killed
            if lock := try_lock(part, wait_s=0):
                part.unlink()
                lock.release()
        for other in self._others():
            if not is_locked(os.path.join(other, CLEANER)):  # of a machine that died
                remove_unused(other)
        self.total_bytes = self._used_bytes() + free_bytes(self._root)
        self.limit_bytes = limit_mib << 20 if limit_mib else int(share * self.total_bytes)

    def close(self) -> None:
        """This process uses the set no more."""
        with contextlib.suppress(OSError), self._granting, locked(self._room):
            self._add(-self._granted_bytes)
            self._granted_bytes = 0
        self._users.release()

    def has(self, name: str, num_bytes: int) -> bool:
        """Whether a file is here: it was verified before it got its name, and is still all there."""
        try:
            return os.stat(self.folder / name).st_size == num_bytes
        except FileNotFoundError:
            return False

    def num_bytes(self) -> int:
        """What the files of this set take."""
        return _size_of(self._set)

    def room_bytes(self) -> int:
        """What the files of this set may take, those that are here included: the budget but for other sets in use."""
        return self.limit_bytes - sum(_size_of(other) for other in self._others() if cleaner.is_used(other))

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
        """Have `write` make a file, durably, unless it is here; False where it finds no room. One process writes, others wait.

        `removable`: files of this set that may go. `required`: also over the budget, as long as the disk has room.

        Raises OSError, and what `write` and `check_stopped` raise, but for NoRoomError.
        """
        part, is_moved, limit_bytes = self._set / f"{name}.part", False, self.limit_bytes
        with locked(part, check_stopped):  # a lock that others get where its owner is killed
            try:
                while not (is_moved or self.has(name, num_bytes)):
                    with locked(self._room):
                        if not (self._make_room(num_bytes, limit_bytes, removable) or required):
                            return False
                        self._add(num_bytes)  # before it is there: all processes write at the same time
                    try:
                        write(part)
                        os.replace(part, self.folder / name)
                        is_moved = True
                    except NoRoomError:  # others have filled the disk
                        required, limit_bytes = False, self._used_bytes() - num_bytes
                    finally:
                        if not is_moved:
                            with locked(self._room):
                                self._add(-num_bytes)
                    fsync_directory(self.folder)
                return True
            finally:
                if not is_moved:  # else it may be another process's that has waited
                    part.unlink(missing_ok=True)

    def put(self, name: str, content: bytes | memoryview) -> bool:
        """Store a small file in memory, of which others may store a copy meanwhile; False where it finds no room."""
        num_bytes = _in_pages(len(content))
        with self._granting:
            if self._granted_bytes < num_bytes and not self._grant(num_bytes):
                return False
            self._granted_bytes -= num_bytes
        partial = self.folder / f".{name}-{threading.get_native_id()}"
        try:
            with open(partial, "wb", buffering=0) as file:
                is_whole = file.write(content) == len(content)
            if is_whole:
                os.link(partial, self.folder / name)
                num_bytes = 0
        except FileExistsError:
            pass
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            is_whole = False
        finally:
            partial.unlink(missing_ok=True)
            with self._granting:
                self._granted_bytes += num_bytes
        return is_whole

    def _grant(self, num_bytes: int) -> bool:
        """Count at least so many bytes as this set's, for small files to come: one of them would not be worth a lock."""
        with locked(self._room):
            for size in (max(num_bytes, _GRANT), num_bytes):
                if self._make_room(size, self.limit_bytes):
                    self._add(size)
                    self._granted_bytes += size
                    return True
        return False

    def _make_room(self, num_bytes: int, limit_bytes: int, removable: Collection[str] = ()) -> bool:
        """Remove what is not needed until so many bytes fit; nothing of this set where they cannot. Callers lock ROOM."""
        if self._used_bytes() + num_bytes <= limit_bytes:
            return True
        for other in self._others():
            remove_unused(other)
        over_bytes = self._used_bytes() + num_bytes - limit_bytes
        files = [(path, path.stat()) for name in removable if (path := self.folder / name).exists()]
        if over_bytes > sum(stat.st_size for _, stat in files):
            return False
        for path, stat in sorted(files, key=lambda each: each[1].st_mtime_ns):
            if over_bytes <= 0:
                break
            path.unlink()
            self._add(-stat.st_size)
            over_bytes -= stat.st_size
        return True

    def _add(self, num_bytes: int) -> None:
        """Count bytes as this set's. Callers lock ROOM."""
        _write_size(self._size, max(0, _size_of(self._set) + num_bytes))

    def _recount(self) -> None:
        """Count what is here, and remove what a killed process left half written. Callers use the set alone."""
        files = list(os.scandir(self.folder)) if self.folder.exists() else []
        for file in files:
            if file.name.startswith("."):
                os.unlink(file)
        with locked(self._room):
            _write_size(self._size, sum(_in_pages(file.stat().st_size) for file in files if not file.name.startswith(".")))

    def _used_bytes(self) -> int:
        """What all sets take."""
        return sum(_size_of(f"{self._root}/{name}") for name in os.listdir(self._root))

    def _others(self) -> list[str]:
        """The other sets. Others have their folders here too."""
        found = {path.parent for name in (USERS, SIZE) for path in self._root.glob(f"*/{name}")}
        return [str(folder) for folder in found - {self._set}]


def _size_of(folder: str | Path) -> int:
    """The bytes of a set, as its processes count them; 0 where it is no set."""
    try:
        with open(f"{folder}/{SIZE}", "rb") as file:
            return int.from_bytes(file.read(8), "little")
    except (FileNotFoundError, NotADirectoryError):
        return 0


def _write_size(path: Path, num_bytes: int) -> None:
    """In one write, of which no kill leaves half."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.pwrite(descriptor, num_bytes.to_bytes(8, "little"), 0)
    finally:
        os.close(descriptor)


def _in_pages(num_bytes: int) -> int:
    """What a file of this length takes."""
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


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
