"""One file of a packed set to this node: checked against its index, tried again where that can help, renamed when it is whole."""

import hashlib
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Protocol, TypeVar

from trainables.data.index import File
from trainables.data.storage.shared_folder import NO_ROOM
from trainables.errors import DataError
from trainables.rundir import fsync_directory

_CHUNK_BYTES = 8 << 20
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 10.0
MOST_FETCHES = 5
"""Of a file that is altered or cut in another way each time."""
_log = logging.getLogger("raydistill")
Result = TypeVar("Result")


class FileStore(Protocol):
    """A folder or server that has the files of a packed set. Safe from several threads at once."""

    retry_s: float
    """How long to go on trying when reading fails; 0 where trying again does not help."""

    def open(self, name: str) -> BinaryIO:
        """A file, to be read and seeked. Raises OSError, or what a file system's library raises."""

    def full_path(self, name: str) -> str:
        """The file's path or URL, for messages."""

    def is_permanent(self, error: Exception) -> bool:
        """Whether the next attempt would meet this error again, however late it comes."""


class Folder:
    """A folder on this machine, or on a file system that it has mounted."""

    retry_s = 0.0

    def __init__(self, root: Path) -> None:
        self._root = root

    def open(self, name: str) -> BinaryIO:
        return open(self._root / name, "rb", buffering=0)

    def full_path(self, name: str) -> str:
        return str(self._root / name)

    def is_permanent(self, error: Exception) -> bool:
        return True


class NoRoomError(Exception):
    """The file system that a file is written to is full."""


class StoppedError(Exception):
    """Nobody needs the file any more."""


def fetch(store: FileStore, file: File, folder: Path, stopped: Callable[[], bool] = lambda: False) -> None:
    """Bring `file` to `folder`. One caller at a time for each file and folder.

    A broken connection goes on from the byte that it reached. A file that is not the one of the index is fetched again: where it
    is wrong in the same way, it lies there so; where it is wrong in another way, it was altered on its way here.

    Raises:
        DataError: it cannot be read for `store.retry_s`, or it is not the one of the index.
        NoRoomError: nothing of it is left.
        StoppedError: `stopped()` became true.
    """
    part, wrong = part_of(folder, file), list[str]()
    try:
        while True:
            problem, sha256 = _download(store, file, part, stopped)
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


def part_of(folder: Path, file: File) -> Path:
    """What a file is called until it is whole."""
    return folder / f".{file.file}.part"


def with_retries(
    store: FileStore,
    name: str,
    attempt: Callable[[], Result],
    stopped: Callable[[], bool] = lambda: False,
    done_bytes: Callable[[], int] = lambda: 0,
) -> Result:
    """What `attempt` returns, called until it succeeds, with growing pauses, for `store.retry_s` after the first failure.

    An attempt that fails but brought `done_bytes` further begins both anew.
    Raises DataError where it is in vain, StoppedError where `stopped()` became true.
    """
    wait_s, failed_at, reached_bytes = _FIRST_WAIT_S, None, 0
    while True:
        try:
            return attempt()
        except (DataError, NoRoomError, StoppedError):
            raise
        except Exception as error:  # the libraries behind file systems raise what they like
            now = time.monotonic()
            if done_bytes() > reached_bytes:
                wait_s, failed_at, reached_bytes = _FIRST_WAIT_S, None, done_bytes()
            failed_at = failed_at or now
            reason = (str(error).splitlines() or [type(error).__name__])[0]
            if isinstance(error, OSError) and error.errno and error.strerror:
                reason = error.strerror
            elif isinstance(error, FileNotFoundError):  # over HTTP its text is the address, also where no server answers
                reason = "there is no such file, or no server answers"
            if store.is_permanent(error) or now - failed_at >= store.retry_s:
                tried = f" for {now - failed_at:.0f} s" if now > failed_at else ""
                raise DataError(f"data.path: {store.full_path(name)} cannot be read{tried}: {reason}") from None
            _log.warning("%s cannot be read, trying again in %g s: %s", store.full_path(name), wait_s, reason)
        until = now + wait_s
        while time.monotonic() < until:
            if stopped():
                raise StoppedError
            time.sleep(0.1)
        wait_s = min(2 * wait_s, _LONGEST_WAIT_S)


def _download(store: FileStore, file: File, part: Path, stopped: Callable[[], bool]) -> tuple[str | None, str]:
    """Write the file's bytes to `part`, durably. What is wrong with them, or None; and their SHA-256."""
    digest, done = hashlib.sha256(), 0
    with open(part, "wb", buffering=0) as target:

        def attempt() -> None:
            nonlocal done
            with store.open(file.file) as source:
                source.seek(done)
                while done <= file.bytes and (chunk := source.read(_CHUNK_BYTES)):
                    if stopped():
                        raise StoppedError
                    _write(target, chunk)
                    digest.update(chunk)
                    done += len(chunk)

        with_retries(store, file.file, attempt, stopped, lambda: done)
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
