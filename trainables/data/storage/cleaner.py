"""Removes a set's files from a node when no process has used them for a while, however these ended, also by SIGKILL.

Run as a module (`python -m … SET GRACE_S`) it is a small process of its own, which outlives the worker that started it. It
needs nothing of the processes that use the set but the locks that end with them.
"""

import contextlib
import os
import shutil
import sys
import time

from trainables.locks import locked, try_lock

USERS = "users"
"""Every process that uses a set has a shared lock of this file in it; its time is that of the last use that was seen."""
CLEANER = "cleaner"
ROOM = ".room"
"""Next to a user's sets: has the lock of whoever counts and changes what they take."""
_START_S = 0.1  # longer than whoever looks whether there is one has its lock
_POLL_S = 0.5


def is_used(folder: str) -> bool:
    """Whether a process uses the set in `folder`."""
    users = os.path.join(folder, USERS)
    return os.path.isfile(users) and try_lock(users) is None


def remove_unused(folder: str, idle_s: float = 0.0) -> bool:
    """Remove the set in `folder` unless a process uses it, or has in the last `idle_s` seconds; whether it is gone."""
    with contextlib.suppress(OSError):  # others remove it, or use it again
        users = os.path.join(folder, USERS)
        if (lock := try_lock(users)) is None:
            os.utime(users)
        else:
            if time.time() - os.stat(users).st_mtime >= idle_s:
                _remove(folder)
            lock.release()
    root = os.path.dirname(folder)
    with contextlib.suppress(OSError):  # others have their folders there
        if os.listdir(root) == [ROOM]:
            with locked(os.path.join(root, ROOM)):
                os.unlink(os.path.join(root, ROOM))
        os.rmdir(root)
    return not os.path.exists(folder)


def _remove(folder: str) -> None:
    """Remove a set: last the file for whose lock a new user waits. A kill leaves a part of it that serves again."""
    if os.path.isdir(data := os.path.join(folder, "data")):
        shutil.rmtree(data)
    for name in sorted(os.listdir(folder), key=USERS.__eq__):
        os.unlink(os.path.join(folder, name))
    os.rmdir(folder)


if __name__ == "__main__" and os.fork() == 0:  # the parent ends: init adopts the child, and Ray finds no child of a worker
    os.setsid()
    cleaning = try_lock(os.path.join(sys.argv[1], CLEANER), wait_s=_START_S)
    while cleaning is not None and not remove_unused(sys.argv[1], idle_s=float(sys.argv[2])):
        time.sleep(_POLL_S)
