"""Remove a set's files from a node once no process has used them for a while, however those processes ended.

Run as a module (`python -m … SET GRACE_S`), it is a small separate process that outlives the worker that started it. It relies
only on file locks, which end with the processes that use the set, even by SIGKILL.
"""

import contextlib
import os
import shutil
import sys
import time

from trainables.locks import locked, try_lock

USERS = "users"
"""Every process that uses a set holds a shared lock on this file in it; its mtime is the last time that a use was observed."""
CLEANER = "cleaner"
ROOM = ".room"
"""A lock file next to a user's sets; hold its lock to count or change the space that they take."""
_START_S = 0.1  # longer than a check for a running cleaner holds the lock
_POLL_S = 0.5


def is_used(folder: str) -> bool:
    """Whether a process uses the set in `folder`."""
    users = os.path.join(folder, USERS)
    return os.path.isfile(users) and try_lock(users) is None


def remove_unused(folder: str, idle_s: float = 0.0) -> bool:
    """Remove the set in `folder` unless a process uses it, or did in the last `idle_s` seconds; return whether it is gone."""
    with contextlib.suppress(OSError):  # raced with another removal, or with a new user
        users = os.path.join(folder, USERS)
        if (lock := try_lock(users)) is None:
            os.utime(users)
        else:
            if time.time() - os.stat(users).st_mtime >= idle_s:
                _remove(folder)
            lock.release()
    root = os.path.dirname(folder)
    with contextlib.suppress(OSError):  # the root still contains other folders
        if os.listdir(root) == [ROOM]:
            with locked(os.path.join(root, ROOM)):
                os.unlink(os.path.join(root, ROOM))
        os.rmdir(root)
    return not os.path.exists(folder)


def _remove(folder: str) -> None:
    """Remove a set; the file whose lock a new user waits for goes last. A kill leaves files that can be used again."""
    if os.path.isdir(data := os.path.join(folder, "data")):
        shutil.rmtree(data)
    for name in sorted(os.listdir(folder), key=USERS.__eq__):
        os.unlink(os.path.join(folder, name))
    os.rmdir(folder)


if __name__ == "__main__" and os.fork() == 0:  # the parent ends and init adopts the child, so that Ray sees no child of a worker
    os.setsid()
    cleaning = try_lock(os.path.join(sys.argv[1], CLEANER), wait_s=_START_S)
    while cleaning is not None and not remove_unused(sys.argv[1], idle_s=float(sys.argv[2])):
        time.sleep(_POLL_S)
