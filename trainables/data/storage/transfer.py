"""One file of a packed set to this node: checked against its index, tried again where that can help, renamed when it is whole."""

import hashlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Protocol, TypeVar

from trainables.data.index import File
from trainables.data.storage.shared_folder import NO_ROOM
from trainables.errors import DataError, DataUnavailableError, StorageError, StorageUnavailableError
from trainables.object_store.retries import NotRetriedError, with_retries
from trainables.rundir import fsync_directory

_CHUNK_BYTES = 8 << 20
MOST_FETCHES = 5
"""Of a file that is altered or cut in another way each time."""
_log = logging.getLogger("raydistill")
T = TypeVar("T")


class FileStore(Protocol):
    """A folder or server that has the files of a packed set. Safe from several threads at once."""

    retry_s: float
    """How long to go on trying when reading fails; 0 where trying again does not help."""

    def open(self, name: str) -> BinaryIO:
        """A file, to be read and seeked. Raises OSError, or what a file system's library raises."""

    def full_path(self, name: str) -> str:
        """The file's path or URL, for messages."""


class Folder:
    """A folder on this machine, or on a file system that it has mounted."""

    retry_s = 0.0

    def __init__(self, root: Path) -> None:
        self._root = root

    def open(self, name: str) -> BinaryIO:
        return open(self._root / name, "rb", buffering=0)

    def full_path(self, name: str) -> str:
        return str(self._root / name)


class NoRoomError(NotRetriedError):
    """The file system that a file is written to is full."""


class StoppedError(NotRetriedError):
    """Nobody needs the file any more."""


def fetch(store: FileStore, file: File, folder: Path, check_stopped: Callable[[], None] = lambda: None) -> None:
    """Bring `file` to `folder`. One caller at a time for each file and folder.

    A broken connection goes on from the byte that it reached. A file that is not the one of the index is fetched again: where it
    is wrong in the same way, it lies there so; where it is wrong in another way, it was altered on its way here.

    Raises:
        DataError: it cannot be read for `store.retry_s`, or it is not the one of the index.
        NoRoomError: nothing of it is left.
        StoppedError: of `check_stopped`.
    """
    part, wrong = part_of(folder, file), list[str]()
    try:
        while True:
            problem, sha256 = _download(store, file, part, check_stopped)
            if problem is None:
                os.replace(part, folder / file.file)
                fsync_directory(folder)
                return
            if sha256 in wrong or len(wrong) == MOST_FETCHES - 1:
                raise DataError(f"data.path: {store.full_path(file.file)} {problem}; restore the file, or pack it again")
            wrong.append(sha256)
            _log.warning("%s %s: fetching it again", store.full_path(file.file), problem)
    finally:
        part.unlink(missing_ok=True)


def read_with_retries(
    store: FileStore,
    name: str,
    attempt: Callable[[], T],
    check_stopped: Callable[[], None] = lambda: None,
    done_bytes: Callable[[], int] = lambda: 0,
) -> T:
    """What `attempt`, which reads a file, returns; see `with_retries`.

    Raises:
        DataUnavailableError: it was in vain for `store.retry_s`.
        DataError: the server's answer will not change.
    """
    what = f"{store.full_path(name)} cannot be read"
    try:
        return with_retries(attempt, what, lambda: store.retry_s, check_stopped=check_stopped, done_bytes=done_bytes)
    except StorageUnavailableError as error:
        raise DataUnavailableError(f"data.path: {error}") from None
    except StorageError as error:
        raise DataError(f"data.path: {error}") from None


def part_of(folder: Path, file: File) -> Path:
    """What a file is called until it is whole."""
    return folder / f".{file.file}.part"


def _download(store: FileStore, file: File, part: Path, check_stopped: Callable[[], None]) -> tuple[str | None, str]:
    """Write the file's bytes to `part`, durably. What is wrong with them, or None; and their SHA-256."""
    digest, done = hashlib.sha256(), 0
    with open(part, "wb", buffering=0) as target:

        def attempt() -> None:
            nonlocal done
            with store.open(file.file) as source:
                source.seek(done)
                while done <= file.bytes and (chunk := source.read(_CHUNK_BYTES)):
                    check_stopped()
                    _write(target, chunk)
                    digest.update(chunk)
                    done += len(chunk)

        read_with_retries(store, file.file, attempt, check_stopped=check_stopped, done_bytes=lambda: done)
        if done != file.bytes:
            more = "at least " if done > file.bytes else ""
            return f"has {more}{done:,} bytes, and its index says {file.bytes:,}", digest.hexdigest()
        if digest.hexdigest() != file.sha256:
            return "has another checksum than its index says", digest.hexdigest()
        os.fsync(target.fileno())
    return None, digest.hexdigest()


def _write(target: BinaryIO, chunk: bytes) -> None:
    view = memoryview(chunk)
    try:
        while view:
            view = view[target.write(view) :]
    except OSError as error:
        if error.errno in NO_ROOM:
            raise NoRoomError from None
        raise DataError(
            f"data.stage: {target.name} cannot be written: {error.strerror}; write data.stage=none, or another folder"
        ) from None
