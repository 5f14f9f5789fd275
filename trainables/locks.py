"""Exclusive file locks between processes and threads. A lock ends with its process, however that ends.

Some network file systems cannot lock files. There a file in this node's /tmp is locked instead, so that only processes of one
node exclude each other, and a warning names the file. File systems mounted with node-local locks (NFS with `local_lock`, Lustre
with `localflock`) silently lock on this node only.
"""

import contextlib
import errno
import fcntl
import functools
import hashlib
import logging
import os
import time
import weakref
from collections.abc import Callable, Iterator

_log = logging.getLogger("raydistill")
_PROBE_S = 0.02  # longer than `is_locked` holds a lock
_MIN_POLL_S, _MAX_POLL_S = 0.002, 0.2
_CANNOT_LOCK = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EBADF)
"""EBADF: NFS cannot exclusively lock a file that is open only for reading."""
_NODE_FOLDER = "/tmp"
"""Not TMPDIR, which may differ between processes of one node."""


class Lock:
    """A lock on an open file. It ends with `release`, with the last reference, or with the process."""

    def __init__(self, descriptor: int) -> None:
        self.release = weakref.finalize(self, _release, descriptor, os.getpid())


def _release(descriptor: int, pid: int) -> None:
    """Unlock and close. A forked child shares the lock, and would keep it if the file were only closed."""
    try:
        if os.getpid() == pid:
            with contextlib.suppress(OSError):  # from a network file system; closing unlocks as well
                fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


def try_lock(path: str | os.PathLike[str], wait_s: float = _PROBE_S, operation: int = fcntl.LOCK_EX) -> Lock | None:
    """Lock the file `path`, creating it if it is missing. Returns None if others hold the lock for `wait_s` seconds.

    `operation` is that of `fcntl.flock`, exclusive by default.

    Raises OSError: the file cannot be opened, or neither it nor one in /tmp can be locked.
    """
    until = time.monotonic() + wait_s
    while True:
        if lock := _try_once(os.fspath(path), operation):
            return lock
        if time.monotonic() >= until:
            return None
        time.sleep(_MIN_POLL_S)


@contextlib.contextmanager
def locked(path: str | os.PathLike[str], waiting: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold the exclusive lock of the file `path`; call `waiting` repeatedly while waiting for it. Raises as `try_lock` does."""
    pause_s = _MIN_POLL_S
    while (lock := _try_once(os.fspath(path))) is None:
        waiting()
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _MAX_POLL_S)
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def locked_or_raise(path: str | os.PathLike[str], refusal: Exception) -> Iterator[None]:
    """Hold the exclusive lock of the file `path`. Raises `refusal` if others hold it, otherwise as `try_lock` does."""
    if (lock := try_lock(path)) is None:
        raise refusal
    try:
        yield
    finally:
        lock.release()


def is_locked(path: str | os.PathLike[str]) -> bool:
    """Whether a process holds the lock of the file `path`; False if the file does not exist. Raises as `try_lock` does."""
    if not os.path.exists(path):
        return False
    try:
        lock = try_lock(path, operation=fcntl.LOCK_SH)  # shared, so that concurrent calls do not see each other
    except FileNotFoundError:  # its folder was just removed
        return False
    if lock is not None:
        lock.release()
    return lock is None


def _try_once(path: str, operation: int = fcntl.LOCK_EX) -> Lock | None:
    try:
        return _lock_at(path, operation)
    except OSError as error:
        if error.errno not in _CANNOT_LOCK:
            raise
        return _lock_at(_on_this_node(path, error.strerror or ""), operation)


def _lock_at(path: str, operation: int) -> Lock | None:
    descriptor = _open(path)
    try:
        fcntl.flock(descriptor, operation | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            return None
        raise
    lock = Lock(descriptor)
    if _is_at(descriptor, path):
        return lock
    lock.release()
    return None


def _open(path: str) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    except PermissionError:  # another user's file: read access is enough to see whether it is locked
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def _is_at(descriptor: int, path: str) -> bool:
    """Whether the open file is still the one at `path`, which may have been removed and created again."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False


@functools.cache
def _on_this_node(path: str, reason: str) -> str:
    _log.warning("%s: its file system cannot lock files (%s): only processes of this node exclude each other", path, reason)
    return os.path.join(_NODE_FOLDER, f"raydistill-{hashlib.sha256(os.path.realpath(path).encode()).hexdigest()[:32]}.lock")
