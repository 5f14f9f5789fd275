"""A user's private folder inside a world-writable one, such as /tmp or /dev/shm."""

import contextlib
import errno
import os
import stat
from pathlib import Path

from trainables.rundir import expand_home


def user_folder(base: str | Path) -> Path:
    """Return BASE/raydistill-UID, created if it is missing. No other user can list, read or write anything in it.

    Raises OSError: it cannot be created, or the path exists and is not a folder of this user.
    """
    folder = expand_home(base) / f"raydistill-{os.getuid()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):  # raced with cleanup by another process
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise PermissionError(errno.EPERM, f"{folder} is not a folder of this user: remove it")
        if stat.S_IMODE(found.st_mode) != 0o700:
            folder.chmod(0o700)
    return folder
