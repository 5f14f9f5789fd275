"""Removes a node's shared folder of data once nobody uses it any more, however its users ended.

Every user holds a shared lock on FOLDER/users. The kernel drops it with the process, also after SIGKILL, so that whoever gets
the exclusive lock knows that no user is left. Run as a script (`python -I -S keeper.py FOLDER GRACE_S`) it waits for that in
a small process of its own, which needs nothing of the package and outlives the worker that started it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import sys
import time

USERS, KEEPER = "users", "keeper"
GONE = ".gone-"
_BYSTANDER_S = 0.1  # longer than anybody who only asks `is_kept` holds the lock


def try_lock(handle: int) -> bool:
    """Take the exclusive lock of an open file if nobody holds it in any way."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def is_at(handle: int, path: str) -> bool:
    """Whether the open file still stands at `path`: it may have been removed, and another made since."""
    try:
        there, here = os.stat(path), os.fstat(handle)
    except FileNotFoundError:
        return False
    return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino)


def is_locked(path: str) -> bool:
    """Whether a process holds the exclusive lock of the file `path`.

    Asks by a shared lock of a moment, so that no two who ask at once take each other for the holder.
    """
    try:
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    finally:
        os.close(handle)


def is_kept(folder: str) -> bool:
    """Whether a keeper watches `folder`."""
    return is_locked(os.path.join(folder, KEEPER))


def remove_unused(folder: str) -> bool:
    """Remove `folder` if nobody uses it; whether it is gone."""
    try:
        handle = os.open(os.path.join(folder, USERS), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except FileNotFoundError:
        return True
    try:
        if not try_lock(handle):
            return False
        _remove(folder, handle)
        return True
    finally:
        os.close(handle)


def _remove(folder: str, locked: int) -> None:
    """Remove `folder`, whose `users` this process has locked exclusively.

    Renamed first: who waits for the lock finds by `is_at` that the folder is gone, and makes it anew.
    """
    if is_at(locked, os.path.join(folder, USERS)):
        gone = f"{folder}{GONE}{os.getpid()}"
        os.rename(folder, gone)
        shutil.rmtree(gone, ignore_errors=True)
        with contextlib.suppress(OSError):  # others have their folders there
            os.rmdir(os.path.dirname(folder))


def watch(folder: str, grace_s: float) -> None:
    """Return when `folder` is removed, which happens once nobody has used it for `grace_s` seconds.

    Returns at once where another keeper watches it.
    """
    keeper = os.open(os.path.join(folder, KEEPER), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    until = time.monotonic() + _BYSTANDER_S
    while not try_lock(keeper):
        if time.monotonic() > until:
            return
        time.sleep(_BYSTANDER_S / 10)
    users = os.open(os.path.join(folder, USERS), os.O_RDWR | os.O_CLOEXEC)
    while True:
        fcntl.flock(users, fcntl.LOCK_EX)  # until the last user has gone
        last_use = os.fstat(users).st_mtime_ns  # every user touches the file as it comes
        fcntl.flock(users, fcntl.LOCK_UN)
        time.sleep(grace_s)
        if try_lock(users):
            if os.fstat(users).st_mtime_ns == last_use:
                _remove(folder, users)
                return
            fcntl.flock(users, fcntl.LOCK_UN)


if __name__ == "__main__":
    if os.fork() == 0:  # the parent ends at once: init adopts the child, and Ray does not find it among a worker's children
        os.setsid()
        with contextlib.suppress(FileNotFoundError):
            watch(sys.argv[1], float(sys.argv[2]))
