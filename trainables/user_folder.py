"""A folder of one user below one that everybody may write, such as /tmp or /dev/shm."""

import contextlib
import errno
import os
import stat
from pathlib import Path

from trainables.rundir import expand_home


def user_folder(base: str | Path) -> Path:
    """BASE/raydistill-UID, made where it is missing: no other user can list, read or write what lies below it.

    Raises OSError: it cannot be made, or what stands there is not a folder of this user.
    """
    folder = expand_home(base) / f"raydistill-{os.getuid()}"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):  # removed in this moment, by a process whose last folder in it was
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise PermissionError(errno.EPERM, f"{folder} is not a folder of this user: remove it")
        if stat.S_IMODE(found.st_mode) != 0o700:
            folder.chmod(0o700)
    return folder
