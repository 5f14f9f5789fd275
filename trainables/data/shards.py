"""Where the shards of a packed set are read: one contract, and the one for files on this machine."""

import errno
import os
import sys
import threading
import weakref
from pathlib import Path
from typing import Any, Protocol

from trainables.data.index import File
from trainables.errors import DataError


class ShardReader(Protocol):
    """Where a split's shards lie: on this machine, or further away. Reading is safe from several threads at once."""

    def read(self, shard: int, offset: int, size: int) -> bytes:
        """`size` bytes of a shard from `offset` on. Raises DataError where it does not have them."""

    def prefetch(self, shard: int, offset: int, size: int) -> None:
        """These bytes will be read next: the disk may bring them meanwhile. Raises DataError as `read` does."""

    def path(self, shard: int) -> Path:
        """The local file of the shard, which may be missing where shards come and go."""


class LocalShards:
    """Shards in a folder, read by position.

    Not memory-mapped: where a disk fails, or a file is cut off under a running job, touching mapped memory kills the process
    (SIGBUS), and a read is an ordinary error. The copy takes 1% of the time that decoding takes. A shard that is replaced
    once it was read from is still the old one; before, it is an error.
    """

    def __init__(self, root: Path, shards: tuple[File, ...]) -> None:
        self._root, self._shards = root, shards
        self._handles: list[int | None] = [None] * len(shards)
        self._identities: list[tuple[int, int]] = []  # of the files that were there when the source was opened
        self._lock = threading.Lock()
        weakref.finalize(self, _close, self._handles)
        for shard in shards:
            try:
                found = os.stat(root / shard.file)
            except OSError as error:
                raise unreadable(root / shard.file, error) from None
            self._check_size(shard, found.st_size)
            self._identities.append(_identity(found))

    def __reduce__(self) -> tuple[Any, ...]:
        return LocalShards, (self._root, self._shards)

    def path(self, shard: int) -> Path:
        return self._root / self._shards[shard].file

    def read(self, shard: int, offset: int, size: int) -> bytes:
        handle = self._handles[shard]
        try:
            content = os.pread(self._open(shard) if handle is None else handle, size, offset)
            while len(content) < size and (more := os.pread(self._open(shard), size - len(content), offset + len(content))):
                content += more  # a read ends early at 2 GiB, and where a signal comes
        except OSError as error:
            raise unreadable(self.path(shard), error) from None
        if len(content) < size:
            raise DataError(f"data.path: {self.path(shard)} was cut off while it was in use; copy or pack it again")
        return content

    def prefetch(self, shard: int, offset: int, size: int) -> None:
        if sys.platform == "linux":
            try:
                os.posix_fadvise(self._open(shard), offset, size, os.POSIX_FADV_WILLNEED)
            except OSError as error:
                raise unreadable(self.path(shard), error) from None

    def _open(self, shard: int) -> int:
        with self._lock:
            handle = self._handles[shard]
            if handle is None:
                handle = _open(self.path(shard))
                try:
                    found = os.fstat(handle)
                    self._check_size(self._shards[shard], found.st_size)
                    if _identity(found) != self._identities[shard]:
                        path = self.path(shard)
                        raise DataError(f"data.path: {path} was replaced while it was in use; resume once the set is whole again")
                except DataError:
                    os.close(handle)
                    raise
                self._handles[shard] = handle
            return handle

    def _check_size(self, shard: File, size: int) -> None:
        if size != shard.bytes:
            path = self._root / shard.file
            raise DataError(f"data.path: {path} has {size:,} bytes, and its index says {shard.bytes:,}; copy or pack it again")


def _identity(found: os.stat_result) -> tuple[int, int]:
    """What is another one where a file was replaced or written to."""
    return found.st_ino, found.st_mtime_ns


def unreadable(path: Path, error: OSError) -> DataError:
    """The error of a file of a packed set that cannot be read."""
    return DataError(f"data.path: {path} cannot be read: {error.strerror}; copy or pack it again")


def _open(path: Path) -> int:
    """A file for reading; the limit on open files is raised where it is in the way: a large set has a thousand shards."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def _close(handles: list[int | None]) -> None:
    for handle in handles:
        if handle is not None:
            os.close(handle)
