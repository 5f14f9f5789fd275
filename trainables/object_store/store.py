"""Read and write the objects below an `s3://` URI. Objects appear atomically; a listing has all objects written before it."""

import contextlib
import ctypes
import io
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, TypeVar

from trainables.object_store.retries import NotRetriedError, with_retries
from trainables.rundir import replacing

RETRY_S = 300.0
"""Retry limit for a server outage during a run."""
OPENING_S = 20.0
"""Retry limit at the start of a command, when a wrong address is more likely."""
CLIENT_ATTEMPTS, CLIENT_S = 3, 10
"""Attempts of the S3 client, and seconds of the GCS client, within one request: nothing can interrupt them."""
_CHUNK_BYTES = 16 << 20
T = TypeVar("T")


class _NoObjectError(NotRetriedError):
    """The object does not exist."""


class Entry(NamedTuple):
    """An object in a listing."""

    size: int
    changed_ns: int
    """Modification time as Unix time, by the store's clock."""


def is_uri(text: str) -> bool:
    return "://" in text


def file_system(uri: str) -> tuple[Any, str]:
    """Return the pyarrow file system of a URI and the path in it. fsspec opens schemes that pyarrow does not support.

    Raises:
        OSError: the server or the disk fails.
        ImportError, ValueError: neither library supports the URI.
    """
    from pyarrow import ArrowInvalid, fs

    try:
        system, root = fs.FileSystem.from_uri(uri)
    except ArrowInvalid:
        import fsspec

        found, root = fsspec.core.url_to_fs(uri)
        system = fs.PyFileSystem(fs.FSSpecHandler(found))
    if system.type_name == "s3":  # by default its client tries for about ten seconds
        _, (options,) = system.__reduce__()
        system = fs.S3FileSystem(**options, retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=CLIENT_ATTEMPTS))
    elif system.type_name == "gcs":  # by default its client tries for 15 minutes
        _, (options,) = system.__reduce__()
        system = fs.GcsFileSystem(**{**options, "retry_time_limit": timedelta(seconds=CLIENT_S)})
    return system, root.rstrip("/")


def object_at(uri: str) -> tuple["ObjectStore", str]:
    """Split an object's URI into its store and name."""
    folder, _, name = uri.rpartition("/")
    return ObjectStore(folder), name


class ObjectStore:
    """The objects below a URI, by their names relative to it. Thread-safe.

    Credentials and endpoint come from the file system's usual sources: AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, ~/.aws, …. Every
    method retries transient errors for `retry_s`, then raises StorageError. A full or read-only disk of this machine raises
    OSError at once.
    """

    def __init__(self, uri: str, retry_s: float = RETRY_S) -> None:
        self.uri, self.retry_s = uri.rstrip("/"), retry_s
        self._opened: tuple[Any, str] | None = None

    def put(self, name: str, content: bytes | Path) -> None:
        """Create or replace an object. Data appended to a file during the upload may be missing."""

        def attempt() -> None:
            # Open the file first: an object that was opened would be completed with what was written so far.
            with io.BytesIO(content) if isinstance(content, bytes) else open(content, "rb") as source:
                chunk = source.read(_CHUNK_BYTES)
                system, root = self._open()
                target = system.open_output_stream(f"{root}/{name}")
                try:
                    while chunk:
                        target.write(chunk)
                        chunk = source.read(_CHUNK_BYTES)
                except BaseException:
                    # pyarrow cannot abort the upload: closing or collecting the stream, even at exit, would complete it.
                    ctypes.pythonapi.Py_IncRef(ctypes.py_object(target))
                    raise
                target.close()

        self._retried("written", name, attempt)

    def read(self, name: str) -> bytes | None:
        """Read a small object; None if it does not exist."""
        content = io.BytesIO()
        return content.getvalue() if self._retried("read", name, lambda: self._read_into(content, name)) else None

    def get(self, name: str, path: Path) -> bool:
        """Atomically replace the file `path` with an object; False if it does not exist."""

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
        """Return all objects below a folder, by name."""

        def attempt() -> dict[str, Entry]:
            from pyarrow import fs

            system, root = self._open()
            selector = fs.FileSelector(f"{root}/{folder}".rstrip("/"), recursive=True, allow_not_found=True)
            found = (each for each in system.get_file_info(selector) if each.type == fs.FileType.File)
            return {each.path[len(root) + 1 :]: Entry(each.size, each.mtime_ns or 0) for each in found}

        return self._retried("listed", folder, attempt)

    def folders(self) -> list[str]:
        """Return the top-level folders."""

        def attempt() -> list[str]:
            from pyarrow import fs

            system, root = self._open()
            found = system.get_file_info(fs.FileSelector(root, allow_not_found=True))
            return [each.base_name for each in found if each.type == fs.FileType.Directory]

        return self._retried("listed", "", attempt)

    def delete(self, name: str) -> None:

        def attempt() -> None:
            system, root = self._open()
            with contextlib.suppress(FileNotFoundError):
                system.delete_file(f"{root}/{name}")

        self._retried("removed", name, attempt)

    def delete_all(self, folder: str = "") -> None:
        """Remove all objects below a folder, hundreds at a time, including folder markers."""

        def attempt() -> None:
            system, root = self._open()
            with contextlib.suppress(FileNotFoundError):
                system.delete_dir(f"{root}/{folder}".rstrip("/"))

        self._retried("removed", folder, attempt)

    def _read_into(self, target: BinaryIO, name: str) -> bool:
        """Copy an object's content to `target`; False if the object does not exist."""
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
                    # The size and the parts are requested separately, and would not match if the object was replaced meanwhile.
                    if source.metadata()["ETag"] == version:
                        return True
        except FileNotFoundError:
            return False

    def _open(self) -> tuple[Any, str]:
        if self._opened is None:
            # Without this option even a small object takes three requests.
            self._opened = file_system(f"{self.uri}?allow_delayed_open=true")
        return self._opened

    def _retried(self, done: str, name: str, attempt: Callable[[], T]) -> T:
        return with_retries(attempt, f"{self.uri}/{name}".rstrip("/") + f" cannot be {done}", lambda: self.retry_s)
