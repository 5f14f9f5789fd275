"""Exclusive locks of files, between processes and threads. A lock ends with its process, however that ends.

Some network file systems cannot lock files. There a file in this node's /tmp is locked instead: processes of one node exclude
each other, those of several do not, and a warning names the file. File systems that are mounted with locks of this node alone
(NFS with `local_lock`, Lustre with `localflock`) lock without a word, and only on this node.
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
_PROBE_S = 0.02  # longer than `is_locked` has a lock
_MIN_POLL_S, _MAX_POLL_S = 0.002, 0.2
_CANNOT_LOCK = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EBADF)
"""EBADF: NFS gives no exclusive lock of a file that is open for reading alone."""
_NODE_FOLDER = "/tmp"
"""Not TMPDIR's, which processes of one node may have set differently."""


class Lock:
    """The exclusive lock of an open file, which ends with `release`, with the last reference, or with the process."""

    def __init__(self, descriptor: int) -> None:
        self.release = weakref.finalize(self, _release, descriptor, os.getpid())


def _release(descriptor: int, pid: int) -> None:
    """Unlock and close. A forked child shares the lock: closing alone would leave it to the child until that ends."""
    try:
        if os.getpid() == pid:
            with contextlib.suppress(OSError):  # of a network file system; closing unlocks as well
                fcntl.flock(descriptor, fcntl.LOCK_UN)
    finally:
        os.close(descriptor)


def try_lock(path: str | os.PathLike[str], wait_s: float = _PROBE_S, operation: int = fcntl.LOCK_EX) -> Lock | None:
    """The lock of the file `path`, which is made where it is missing; None where others have it for `wait_s` seconds.

    `operation`: as of `fcntl.flock`, exclusive by default.

    Raises OSError where the file cannot be opened, or neither it nor one in /tmp can be locked.
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
    """Wait for the exclusive lock of the file `path`, and call `waiting` every so often until then. Raises as `try_lock` does."""
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
    """The exclusive lock of the file `path`; raises `refusal` where others have it, and as `try_lock` does."""
    if (lock := try_lock(path)) is None:
        raise refusal
    try:
        yield
    finally:
        lock.release()


def is_locked(path: str | os.PathLike[str]) -> bool:
    """Whether anybody has the lock of the file `path`; False where there is no such file. Raises as `try_lock` does."""
    if not os.path.exists(path):
        return False
    try:
        lock = try_lock(path, operation=fcntl.LOCK_SH)  # so that several may ask at once
    except FileNotFoundError:  # its folder was removed since
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
    except PermissionError:  # another user's: whoever may read it may find out whether it is locked
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
