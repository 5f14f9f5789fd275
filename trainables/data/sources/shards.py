"""Where the shards of a packed set are read: one contract, and the one for files on this machine."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
import threading
from collections import deque
from pathlib import Path
from typing import Any, Protocol

from trainables.data.index import File
from trainables.errors import DataError

MOST_CHECKED = 4096
"""Shards whose files are looked at when a set is opened: every process does it, and a file server has to answer all of them."""


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
    once it was read from is still the old one; before, it is an error. A shard's file stays open until the process has a
    quarter of the files open that it may have: then the one opened longest ago is closed.
    """

    def __init__(self, root: Path, shards: tuple[File, ...]) -> None:
        self._root, self._shards = root, shards
        self._handles: list[_Handle | None] = [None] * len(shards)
        self._opened = deque[int]()
        self._identities: list[tuple[int, int] | None] = [None] * len(shards)
        """Of the files that were there when the source was opened; None: not looked at so far."""
        self._lock = threading.Lock()
        _raise_open_limit(len(shards))
        for number in range(0, len(shards), -(-len(shards) // MOST_CHECKED) or 1):
            shard = shards[number]
            try:
                found = os.stat(root / shard.file)
            except OSError as error:
                raise unreadable(root / shard.file, error) from None
            self._check_size(shard, found.st_size)
            self._identities[number] = _identity(found)

    def __reduce__(self) -> tuple[Any, ...]:
        return LocalShards, (self._root, self._shards)

    def path(self, shard: int) -> Path:
        return self._root / self._shards[shard].file

    def read(self, shard: int, offset: int, size: int) -> bytes:
        try:
            handle = self._handles[shard] or self._open(shard)
            content = os.pread(handle.descriptor, size, offset)
            while len(content) < size and (more := os.pread(handle.descriptor, size - len(content), offset + len(content))):
                content += more  # a read ends early at 2 GiB, and where a signal comes
        except OSError as error:
            raise unreadable(self.path(shard), error) from None
        if len(content) < size:
            raise DataError(f"data.path: {self.path(shard)} was cut off while it was in use; copy or pack it again")
        return content

    def prefetch(self, shard: int, offset: int, size: int) -> None:
        if sys.platform == "linux":
            try:
                handle = self._open(shard)  # in a name: another thread may let go of it meanwhile
                os.posix_fadvise(handle.descriptor, offset, size, os.POSIX_FADV_WILLNEED)
            except OSError as error:
                raise unreadable(self.path(shard), error) from None

    def _open(self, shard: int) -> _Handle:
        with self._lock:
            handle = self._handles[shard]
            if handle is None:
                handle = _Handle(os.open(self.path(shard), os.O_RDONLY | os.O_CLOEXEC))
                found = os.fstat(handle.descriptor)
                self._check_size(self._shards[shard], found.st_size)
                if self._identities[shard] not in (None, _identity(found)):
                    path = self.path(shard)
                    raise DataError(f"data.path: {path} was replaced while it was in use; resume once the set is whole again")
                self._identities[shard] = _identity(found)
                while len(self._opened) >= _most_open():
                    self._handles[self._opened.popleft()] = None
                self._opened.append(shard)
                self._handles[shard] = handle
            return handle

    def _check_size(self, shard: File, size: int) -> None:
        if size != shard.bytes:
            path = self._root / shard.file
            raise DataError(f"data.path: {path} has {size:,} bytes, and its index says {shard.bytes:,}; copy or pack it again")


class _Handle:
    """An open file, which is closed once no thread reads from it any more."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __del__(self) -> None:
        os.close(self.descriptor)


def _identity(found: os.stat_result) -> tuple[int, int]:
    """What is another one where a file was replaced or written to."""
    return found.st_ino, found.st_mtime_ns


def unreadable(path: Path, error: OSError) -> DataError:
    """The error of a file of a packed set that cannot be read."""
    return DataError(f"data.path: {path} cannot be read: {error.strerror}; copy or pack it again")


def _raise_open_limit(num_files: int) -> None:
    """Raise the process's limit on open files as far as it may, if it is in the way: a large set has a thousand shards."""
    if num_files > _most_open():
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        with contextlib.suppress(OSError, ValueError):  # refused: fewer stay open
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _most_open() -> int:
    """How many files of one split may be open: other parts of the process need some too."""
    return max(1, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
