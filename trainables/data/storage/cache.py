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
        users = None
        while users is None:
            self._root = user_folder(base)
            self._set = self._root / identity
            with contextlib.suppress(FileNotFoundError):  # others have removed the set or its root in this moment
                self._set.mkdir(mode=0o700, exist_ok=True)
                users = try_lock(self._set / USERS, operation=fcntl.LOCK_SH)
        self._users, self.close = users, users.release
        os.utime(self._set / USERS)
        if not is_locked(self._set / CLEANER):
            _start_cleaner(self._set, grace_s)
        self.folder, self._size, self._room = self._set / "data", self._set / SIZE, str(self._root / ROOM)
        self.folder.mkdir(mode=0o700, exist_ok=True)
        self._size.touch()
        self._granting, self._granted_bytes = threading.Lock(), 0
        self._in_flight: dict[str, int] = {}  # bytes of files that this process writes
        for part in self._set.glob("*.part"):  # of processes that were killed
            if lock := try_lock(part, wait_s=0):
                part.unlink()
                lock.release()
        for other in self._others():
            if not is_locked(os.path.join(other, CLEANER)):  # of a machine that died
                remove_unused(other)
        self.total_bytes = self._used_bytes() + free_bytes(self._root)
        self.limit_bytes = limit_mib << 20 if limit_mib else int(share * self.total_bytes)

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
        part, is_moved = self._set / f"{name}.part", False
        with locked(part, check_stopped):  # a lock that others get where its owner is killed
            try:
                while not (is_moved or self.has(name, num_bytes)):
                    with locked(self._room):
                        if not (self._make_room(num_bytes, removable) or required):
                            return False
                        self._in_flight[name] = num_bytes
                    try:
                        write(part)
                        with locked(self._room):
                            os.replace(part, self.folder / name)
                            is_moved = True
                            self._add(self._in_flight.pop(name))
                        fsync_directory(self.folder)
                    except NoRoomError:  # others have filled the disk
                        required, self.limit_bytes = False, self._used_bytes()
                    finally:
                        self._in_flight.pop(name, None)
                return True
            finally:
                if not is_moved:  # else it may be another process's that has waited
                    part.unlink(missing_ok=True)

    def put(self, name: str, content: bytes | memoryview) -> bool:
        """Store a small file in memory, of which others may store a copy meanwhile; False where it finds no room."""
        with self._granting:
            if self._granted_bytes < len(content) and not self._grant(len(content)):
                return False
            self._granted_bytes -= len(content)
        try:
            # Without a name so far, it ends with whoever is killed.
            with open(os.open(self.folder, os.O_TMPFILE | os.O_WRONLY, 0o600), "wb", buffering=0) as file:
                is_whole = file.write(content) == len(content)
                with contextlib.suppress(FileExistsError):
                    if is_whole:
                        link, handle = f"/proc/self/fd/{file.fileno()}", file.fileno()
                        os.link(link, f"{self.folder}/{name}", src_dir_fd=handle, follow_symlinks=True)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            return False
        return is_whole

    def _grant(self, num_bytes: int) -> bool:
        """Count at least so many bytes as this set's, for small files to come: one of them would not be worth a lock."""
        with locked(self._room):
            for size in (max(num_bytes, _GRANT), num_bytes):
                if self._make_room(size):
                    self._add(size)
                    self._granted_bytes += size
                    return True
        return False

    def _make_room(self, num_bytes: int, removable: Collection[str] = ()) -> bool:
        """Remove what is not needed until so many bytes fit; nothing of this set where they cannot. Callers lock ROOM."""
        needed_bytes = num_bytes + sum(self._in_flight.values())
        if self._used_bytes() + needed_bytes <= self.limit_bytes:
            return True
        for other in self._others():
            remove_unused(other)
        over_bytes = self._used_bytes() + needed_bytes - self.limit_bytes
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
        """Count bytes as this set's. The count is the size of an empty file: no kill leaves half of it. Callers lock ROOM."""
        os.truncate(self._size, max(0, _size_of(self._set) + num_bytes))

    def _used_bytes(self) -> int:
        """What all sets take."""
        return sum(_size_of(f"{self._root}/{name}") for name in os.listdir(self._root))

    def _others(self) -> list[str]:
        return [str(path.parent) for path in self._root.glob(f"*/{SIZE}") if path.parent != self._set]


def _size_of(folder: str | Path) -> int:
    """The bytes of a set, as its processes count them; 0 where it is no set."""
    try:
        return os.stat(f"{folder}/{SIZE}").st_size
    except (FileNotFoundError, NotADirectoryError):
        return 0


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
