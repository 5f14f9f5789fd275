"""Where a packed set lies: in a folder, or at s3://, gs://, hdfs://, file:// or any other URI that pyarrow or fsspec opens."""

import hashlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from trainables.data.index import File
from trainables.data.storage.cache import no_room_if_full
from trainables.errors import DataError, DataUnavailableError, StorageError, StorageUnavailableError
from trainables.object_store.retries import NotRetriedError, with_retries
from trainables.object_store.store import file_system, is_uri

_CHUNK_BYTES = 8 << 20
_log = logging.getLogger("raydistill")
T = TypeVar("T")


class StoppedError(NotRetriedError):
    """A transfer that was cancelled."""


class Origin:
    """The files of a packed set in a folder or below a URI. Safe from several threads at once.

    Credentials and endpoint come from where the file system looks for them: AWS_ENDPOINT_URL, …
    """

    def __init__(self, path: str, retry_s: float = 0.0) -> None:
        """`retry_s`: how long to go on trying when reading fails; 0 where trying again does not help."""
        self.path, self.retry_s = path.rstrip("/") if is_uri(path) else path, retry_s
        self._root: tuple[Any, str] | None = None

    def open(self, name: str) -> BinaryIO:
        """A file, to be read and seeked. Raises OSError, or what a file system's library raises."""
        if not is_uri(self.path):
            return open(self.full_path(name), "rb", buffering=0)
        if self._root is None:
            self._root = file_system(self.path)
        system, root = self._root
        return system.open_input_file(f"{root}/{name}")  # type: ignore[no-any-return]

    def full_path(self, name: str) -> str:
        """The file's path or URI."""
        return os.path.join(self.path, name)

    def read(self, name: str) -> bytes:
        """A small file. Raises DataError as `_retried` does."""

        def attempt() -> bytes:
            with self.open(name) as file:
                return file.read()

        return self._retried(name, attempt)

    def fetch(self, file: File, target: Path, check_stopped: Callable[[], None] = lambda: None) -> None:
        """Write the verified bytes of `file` to the file `target`, which is there, durably.

        A broken connection goes on from the byte that it reached. A file that is not the one of the index is fetched again, since
        it may have been altered on its way here, and then an error.

        Raises:
            DataError: it cannot be read for `retry_s`, or it is not the one of the index.
            NoRoomError: the disk is full.
            StoppedError: of `check_stopped`.
        """
        with no_room_if_full(), open(target, "r+b", buffering=0) as part:  # it may be as long as it will be
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
        """Write the file's bytes to `part`. What is wrong with them; None: nothing."""
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
        """What `attempt`, which reads a file, returns; see `with_retries`.

        Raises:
            DataUnavailableError: it was in vain for `retry_s`.
            DataError: the server's answer will not change.
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
        with no_room_if_full():
            while view:
                view = view[target.write(view) :]
    except OSError as error:
        raise DataError(
            f"data.stage: {target.name} cannot be written: {error.strerror}; write data.stage=none, or another folder"
        ) from None
