"""Read a packed set from its folder, or from s3://, gs://, hdfs://, file:// or any URI that pyarrow or fsspec opens."""

import hashlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from trainables.data.index import File
from trainables.data.storage.cache import detect_full_disk
from trainables.errors import DataError, DataUnavailableError, StorageError, StorageUnavailableError
from trainables.object_store.retries import NotRetriedError, with_retries
from trainables.object_store.store import file_system, is_uri

_CHUNK_BYTES = 8 << 20
_log = logging.getLogger("raydistill")
T = TypeVar("T")


class StoppedError(NotRetriedError):
    """A transfer was canceled."""


class Origin:
    """The files of a packed set in a folder or below a URI. Thread-safe.

    Credentials and the endpoint come from the file system's usual sources, such as AWS_ENDPOINT_URL.
    """

    def __init__(self, path: str, retry_s: float = 0.0) -> None:
        """`retry_s` is how long to retry failed reads; 0 if retrying does not help."""
        self.path, self.retry_s = path.rstrip("/") if is_uri(path) else path, retry_s
        self._root: tuple[Any, str] | None = None

    def open(self, name: str) -> BinaryIO:
        """Open a seekable file for reading. Raises OSError, or an error of the file system's library."""
        if not is_uri(self.path):
            return open(self.full_path(name), "rb", buffering=0)
        if self._root is None:
            self._root = file_system(self.path)
        system, root = self._root
        return system.open_input_file(f"{root}/{name}")  # type: ignore[no-any-return]

    def full_path(self, name: str) -> str:
        """Return the file's path or URI."""
        return os.path.join(self.path, name)

    def read(self, name: str) -> bytes:
        """Read a small file. Raises DataError as `_retried` does."""

        def attempt() -> bytes:
            with self.open(name) as file:
                return file.read()

        return self._retried(name, attempt)

    def fetch(self, file: File, target: Path, check_stopped: Callable[[], None] = lambda: None) -> None:
        """Write the verified bytes of `file` durably to `target`, which must exist.

        A broken connection is resumed at the byte that it reached. A file that does not match the index is fetched once more,
        since it may have been altered in transfer; then it is an error.

        Raises:
            DataError: it cannot be read within `retry_s`, or it does not match the index.
            DiskFullError: the disk is full.
            StoppedError: raised by `check_stopped`.
        """
        with detect_full_disk(), open(target, "r+b", buffering=0) as part:  # it may already have its full length
            for tries_left in (1, 0):
                problem = self._download(file, part, check_stopped)
                if problem is None:
                    part.truncate()
                    os.fsync(part.fileno())
                    return
                if not tries_left:
                    raise DataError(f"data.path: {self.full_path(file.file)} {problem}; restore the file, or pack it again")
                _log.warning("%s %s: fetching it again", self.full_path(file.file), problem)

    def _download(self, file: File, part: BinaryIO, check_stopped: Callable[[], None]) -> str | None:
        """Write the file's bytes to `part`. Return what is wrong with them, or None."""
        digest, done = hashlib.sha256(), 0
        part.seek(0)

        def attempt() -> None:
            nonlocal done
            with self.open(file.file) as source:
                source.seek(done)
                while done <= file.bytes and (chunk := source.read(_CHUNK_BYTES)):
                    check_stopped()
                    _write(part, chunk)
                    digest.update(chunk)
                    done += len(chunk)

        self._retried(file.file, attempt, check_stopped=check_stopped, done_bytes=lambda: done)
        if done != file.bytes:
            more = "at least " if done > file.bytes else ""
            return f"has {more}{done:,} bytes, and its index says {file.bytes:,}"
        return None if digest.hexdigest() == file.sha256 else "does not match the checksum in its index"

    def _retried(self, name: str, attempt: Callable[[], T], **more: Any) -> T:
        """Return the result of `attempt`, which reads a file; see `with_retries`.

        Raises:
            DataUnavailableError: all attempts within `retry_s` failed.
            DataError: the error is permanent.
        """
        try:
            return with_retries(attempt, f"{self.full_path(name)} cannot be read", lambda: self.retry_s, **more)
        except StorageUnavailableError as error:
            raise DataUnavailableError(f"data.path: {error}") from None
        except StorageError as error:
            raise DataError(f"data.path: {error}") from None


def _write(target: BinaryIO, chunk: bytes) -> None:
    view = memoryview(chunk)
    try:
        with detect_full_disk():
            while view:
                view = view[target.write(view) :]
    except OSError as error:
        raise DataError(
            f"data.stage: {target.name} cannot be written: {error.strerror}; write data.stage=none, or another folder"
        ) from None
