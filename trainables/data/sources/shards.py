"""Where the shards of a packed set are read: the interface, and the shards in a folder of this machine."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Protocol

from trainables.data.index import File
from trainables.data.order import Order
from trainables.errors import DataError


class ShardReader(Protocol):
    """Where a split's shards lie: on this machine, or further away. Reading is safe from several threads at once."""

    def read(self, shard: int, offset: int, size: int) -> bytes:
        """`size` bytes of a shard from `offset` on. Raises DataError where it does not have them."""

    def path(self, shard: int) -> Path:
        """The local file of the shard, which may be missing where shards come and go."""

    def follow(self, order: Order, epoch: int, position: int) -> None:
        """See `Source.follow`."""

    def close(self) -> None:
        """See `Source.close`."""


class LocalShards:
    """Shards in a folder, read by position; `close` calls `release`.

    Not memory-mapped: where a disk fails, or a file is cut off under a running job, touching mapped memory kills the process
    (SIGBUS), and a read is an ordinary error. The copy takes 1% of the time that decoding takes. A shard that is replaced
    once it was read from is still the old one; before, it is an error. A shard's file stays open until the process has a
    quarter of the files open that it may have: then the one that was used longest ago is closed.
    """

    def __init__(self, root: Path, shards: tuple[File, ...], release: Callable[[], None] = lambda: None) -> None:
        """Raises DataError where a shard is missing, or of another size than the index says."""
        self._root, self._shards, self.close = root, shards, release
        identities = [_identity(root / shard.file, shard, os.stat) for shard in shards]
        # without `self`, so that the files are closed with the last reference to it
        self._open = lru_cache(_max_open(len(shards)))(partial(_open, root, shards, identities))

    def __reduce__(self) -> tuple[Any, ...]:
        return LocalShards, (self._root, self._shards)

    def path(self, shard: int) -> Path:
        return self._root / self._shards[shard].file

    def read(self, shard: int, offset: int, size: int) -> bytes:
        handle = self._open(shard)  # in a name: another thread may let go of it meanwhile
        try:
            content = os.pread(handle.descriptor, size, offset)
            while len(content) < size and (more := os.pread(handle.descriptor, size - len(content), offset + len(content))):
                content += more  # a read ends early at 2 GiB, and where a signal comes
        except OSError as error:
            raise unreadable(self.path(shard), error) from None
        if len(content) < size:
            raise DataError(f"data.path: {self.path(shard)} was cut off while it was in use; copy or pack it again")
        return content

    def follow(self, order: Order, epoch: int, position: int) -> None:
        """All are here already."""


class _Handle:
    """An open file, which is closed once no thread reads from it any more."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    def __del__(self) -> None:
        os.close(self.descriptor)


def _open(root: Path, shards: Sequence[File], identities: Sequence[tuple[int, int]], shard: int) -> _Handle:
    path = root / shards[shard].file
    try:
        handle = _Handle(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        raise unreadable(path, error) from None
    if _identity(path, shards[shard], lambda _: os.fstat(handle.descriptor)) != identities[shard]:
        raise DataError(f"data.path: {path} was replaced while it was in use; resume once the set is whole again")
    return handle


def _identity(path: Path, shard: File, stat: Callable[[Path], os.stat_result]) -> tuple[int, int]:
    """What is another one where a file was replaced or written to. Raises DataError where it is not as long as the index says."""
    try:
        found = stat(path)
    except OSError as error:
        raise unreadable(path, error) from None
    if found.st_size != shard.bytes:
        raise DataError(
            f"data.path: {path} has {found.st_size:,} bytes, and its index says {shard.bytes:,}; copy or pack it again"
        )
    return found.st_ino, found.st_mtime_ns


def unreadable(path: Path, error: OSError) -> DataError:
    """The error of a file of a packed set that cannot be read."""
    return DataError(f"data.path: {path} cannot be read: {error.strerror}; copy or pack it again")


def _max_open(num_files: int) -> int:
    """How many files of one split may be open: a quarter of the process's limit, which is raised if it is in the way."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if num_files > soft // 4:
        with contextlib.suppress(OSError, ValueError):  # refused: fewer stay open
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return max(1, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4)
