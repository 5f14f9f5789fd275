"""The objects below an `s3://` URI. An object appears whole or not at all; a listing has all that was put before it."""

import ctypes
import errno
import io
import logging
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

from trainables.errors import StorageError
from trainables.redact import redact
from trainables.rundir import replacing

RETRY_S = 300.0
"""How long a server may be gone in the middle of a run."""
OPENING_S = 20.0
"""And when a command begins, where a wrong address is more likely."""
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 10.0
_CHUNK_BYTES = 16 << 20
_PERMANENT = re.compile(
    r"ACCESS_DENIED|INVALID_ACCESS_KEY|SIGNATURE_DOES_NOT_MATCH|NO_SUCH_BUCKET|INVALID_BUCKET|UNAUTHORIZED|FORBIDDEN"
    r"|HTTP status 40[13]|Unable to load lib|No credentials",
    re.I,
)
_LOCAL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
"""Of this machine's disk, never of the server."""
_SDK_PREFIX = re.compile(r"^.*?AWS Error (?=\w)")
_log = logging.getLogger("raydistill")
T = TypeVar("T")


class _NoObjectError(Exception):
    """There is no object of this name."""


class Entry(NamedTuple):
    """An object as a listing has it."""

    size: int
    changed_ns: int
    """Unix time, by the store's clock."""


def file_system(uri: str) -> tuple[Any, str]:
    """The pyarrow file system of a URI and the path there; fsspec opens what pyarrow does not know.

    Raises OSError, or ImportError and ValueError where neither knows it.
    """
    from pyarrow import ArrowInvalid, fs

    try:
        system, root = fs.FileSystem.from_uri(uri)
    except ArrowInvalid:
        import fsspec

        found, root = fsspec.core.url_to_fs(uri)
        system = fs.PyFileSystem(fs.FSSpecHandler(found))
    return system, root.rstrip("/")


def is_permanent(error: Exception) -> bool:
    """Whether the next attempt would meet this error again, however late it comes."""
    return isinstance(error, FileNotFoundError | PermissionError | ImportError | ValueError) or bool(
        _PERMANENT.search(str(error))
    )


class ObjectStore:
    """The objects below a URI, by their names relative to it. Safe from several threads at once.

    Credentials and endpoint come from where the file system looks for them: AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, ~/.aws, ….
    Every method tries again for `retry_s` what may pass, and raises StorageError where that was in vain; a disk of this machine
    that is full or read-only is an OSError at once.
    """

    def __init__(self, uri: str, retry_s: float = RETRY_S) -> None:
        self.uri, self.retry_s = uri.rstrip("/"), retry_s
        self._opened: tuple[Any, str] | None = None

    def put(self, name: str, content: bytes | Path) -> None:
        """Replace an object, or make it. A file is read as it is now; what is appended meanwhile may be missing."""

        def attempt() -> None:
            # A file is opened before the object: an object that has begun would be completed with what was written of it.
            with io.BytesIO(content) if isinstance(content, bytes) else open(content, "rb") as source:
                chunk = source.read(_CHUNK_BYTES)
                system, root = self._open()
                target = system.open_output_stream(f"{root}/{name}")
                try:
                    while chunk:
                        target.write(chunk)
                        chunk = source.read(_CHUNK_BYTES)
                except BaseException:
                    # Closed or collected, even at exit, it would complete the object; pyarrow cannot abort it.
                    ctypes.pythonapi.Py_IncRef(ctypes.py_object(target))
                    raise
                target.close()

        self._retried("written", name, attempt)

    def read(self, name: str) -> bytes | None:
        """A small object; None where there is none."""
        content = io.BytesIO()
        return content.getvalue() if self._retried("read", name, lambda: self._read_into(content, name)) else None

    def get(self, name: str, path: Path) -> bool:
        """Replace the file `path` with an object, atomically; False where there is no such object."""

        def attempt() -> bool:
            with replacing(path) as temporary, open(temporary, "wb") as target:
                if not self._read_into(target, name):
                    raise _NoObjectError
            return True

        try:
            return self._retried("read", name, attempt)
        except _NoObjectError:
            return False

    def entries(self, folder: str = "") -> dict[str, Entry]:
        """All objects below a folder, by name."""

        def attempt() -> dict[str, Entry]:
            from pyarrow import fs

            system, root = self._open()
            selector = fs.FileSelector(f"{root}/{folder}".rstrip("/"), recursive=True, allow_not_found=True)
            found = (each for each in system.get_file_info(selector) if each.type == fs.FileType.File)
            return {each.path[len(root) + 1 :]: Entry(each.size, each.mtime_ns or 0) for each in found}

        return self._retried("listed", folder, attempt)

    def delete(self, name: str) -> None:
        """Remove an object, if there is one."""

        def attempt() -> None:
            system, root = self._open()
            try:
                system.delete_file(f"{root}/{name}")
            except FileNotFoundError:
                return

        self._retried("removed", name, attempt)

    def _read_into(self, target: BinaryIO, name: str) -> bool:
        """An object's content; False where there is no such object."""
        system, root = self._open()
        try:
            while True:
                target.seek(0)
                target.truncate()
                with system.open_input_file(f"{root}/{name}") as source:
                    version = source.metadata()["ETag"]
                    while chunk := source.read(_CHUNK_BYTES):
                        target.write(chunk)
                with system.open_input_file(f"{root}/{name}") as source:
                    # Parts are requested one by one, and the size before them: of an object that was replaced they do not fit.
                    if source.metadata()["ETag"] == version:
                        return True
        except FileNotFoundError:
            return False

    def _open(self) -> tuple[Any, str]:
        if self._opened is None:
            # Without it even a small object is three requests.
            self._opened = file_system(f"{self.uri}?allow_delayed_open=true")
        return self._opened

    def _retried(self, done: str, name: str, attempt: Callable[[], T]) -> T:
        wait_s, failed_at = _FIRST_WAIT_S, None
        while True:
            try:
                return attempt()
            except _NoObjectError:
                raise
            except Exception as error:  # the libraries behind file systems raise what they like
                if isinstance(error, OSError) and error.errno in _LOCAL:
                    raise
                now = time.monotonic()
                failed_at = now if failed_at is None else failed_at
                what = f"{self.uri}/{name}".rstrip("/")
                reason = _reason(error)
                if is_permanent(error) or now - failed_at >= self.retry_s:
                    tried = f" for {now - failed_at:.0f} s" if now - failed_at >= 1 else ""
                    raise StorageError(f"{what} cannot be {done}{tried}: {reason}") from None
                _log.warning("%s cannot be %s, trying again in %g s: %s", what, done, wait_s, reason)
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)


def _reason(error: Exception) -> str:
    """The first line of a library's error, from the AWS error's name on."""
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return redact(_SDK_PREFIX.sub("", line))
