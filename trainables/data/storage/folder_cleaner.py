"""Removes a node's shared folder of data once nobody uses it any more, however its users ended.

Every user has the lock of a file of its own in FOLDER/users, which ends with its process, also after SIGKILL. Users come, and the
folder goes, under the lock of FOLDER/registry. Run as a module (`python -m … FOLDER GRACE_S`) it waits until the users are gone,
in a small process of its own, which outlives the worker that started it.
"""

import contextlib
import os
import shutil
import sys
import time

from trainables.locks import is_locked, locked, try_lock

USERS, REGISTRY, CLEANER = "users", "registry", "cleaner"
REMOVED = ".removed-"
_START_S = 0.1  # longer than anybody who only calls `is_watched` has the lock
_POLL_S = 0.5


def is_watched(folder: str) -> bool:
    """Whether a process waits to remove `folder`."""
    return is_locked(os.path.join(folder, CLEANER))


def is_used(folder: str) -> bool:
    """Whether a process has a lease of `folder`."""
    users = os.path.join(folder, USERS)
    return os.path.isdir(users) and any(is_locked(os.path.join(users, user)) for user in os.listdir(users))


def remove_unused(folder: str) -> bool:
    """Remove `folder` if nobody uses it; whether it is gone."""
    if not os.path.isdir(folder):
        return True
    lock = try_lock(os.path.join(folder, REGISTRY))
    if lock is None:
        return False
    try:
        return not is_used(folder) and _remove(folder)
    finally:
        lock.release()


def _remove(folder: str) -> bool:
    """Remove `folder`, whose registry this process has locked. Renamed first, so that it is never there in part."""
    removed = f"{folder}{REMOVED}{os.getpid()}"
    os.rename(folder, removed)
    shutil.rmtree(removed, ignore_errors=True)
    with contextlib.suppress(OSError):  # others have their folders there
        os.rmdir(os.path.dirname(folder))
    return True


def wait_until_removed(folder: str, grace_s: float) -> None:
    """Return when `folder` is removed, which happens once nobody has used it for `grace_s` seconds.

    Returns at once where another process watches it. Raises FileNotFoundError where others have removed it.
    """
    users = os.path.join(folder, USERS)
    lock = try_lock(os.path.join(folder, CLEANER), wait_s=_START_S)
    while lock is not None:
        while is_used(folder):
            time.sleep(_POLL_S)
        last_use = os.stat(users).st_mtime_ns  # of the last user that came or went
        time.sleep(grace_s)
        with locked(os.path.join(folder, REGISTRY)):
            if os.stat(users).st_mtime_ns == last_use and not is_used(folder) and _remove(folder):
                return


if __name__ == "__main__":
    if os.fork() == 0:  # the parent ends at once: init adopts the child, and Ray does not find it among a worker's children
        os.setsid()
        with contextlib.suppress(FileNotFoundError):
            wait_until_removed(sys.argv[1], float(sys.argv[2]))
