"""Shards of a distant packed set in a folder of this node: fetched ahead of their use, at most so many bytes at a time.

What is read longest ago makes room. A file is opened for every read, so that one that was removed costs no disk: who still needs
it fetches it again.
"""

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from trainables.data.index import File, Index
from trainables.data.order import Order, Split
from trainables.data.storage.next_shards import NextShards
from trainables.data.storage.shared_folder import FolderLease, format_bytes, reported_as
from trainables.data.storage.staging import is_whole
from trainables.data.storage.transfer import FileStore, NoRoomError, StoppedError, fetch, part_of
from trainables.errors import DataError, DataUnavailableError
from trainables.locks import is_locked, locked

_NUM_THREADS = 4  # shards fetched at a time
_TOUCH_EVERY_S = 1.0
_LOOK_AGAIN_S = 1.0
_RETRY_AHEAD_S = 10.0  # until a shard is fetched ahead again whose server did not answer
_log = logging.getLogger("raydistill")


class RemoteShards:
    """One split's shards; all processes of the node that have a `lease` share the folder and its limit.

    A shard that is not there is fetched by whoever reads it. Once `follow` was called, threads fetch ahead.
    """

    def __init__(self, server: FileStore, lease: FolderLease, index: Index, split: Split, *, limit_bytes: int) -> None:
        self.server, self.limit_bytes, self.shards = server, limit_bytes, index.splits[split].shards
        self.folder, self._lease = lease.folder / "data", lease
        self.largest_val_bytes = max((shard.bytes for shard in index.splits["val"].shards), default=0)
        self._files = {file.file: file for part in index.splits.values() for file in part.shards}
        self._touched_at = [0.0] * len(self.shards)
        self._next_shards = NextShards(self.shards, repeats=split == "train")
        self._changed = threading.Condition()
        self._present_shards: set[int] = set()  # or on its way; what was removed since is found when it is read
        self._failed: dict[int, DataError] = {}  # whoever reads one gets its error
        self._retry_at_s: dict[int, float] = {}  # of shards that were to be fetched ahead while the server did not answer
        self._threads: list[threading.Thread] = []
        self._closed = False

    def path(self, shard: int) -> Path:
        """Where the shard's file lies, while it is here."""
        return self.folder / self.shards[shard].file

    def read(self, shard: int, offset: int, size: int) -> bytes:
        """`size` bytes of a shard from `offset` on; waits until the shard is there.

        Raises DataError where it cannot be fetched, is not the one of the index, or finds no room.
        """
        path = self.folder / self.shards[shard].file
        while True:
            try:
                with open(path, "rb", buffering=0) as file:
                    content = os.pread(file.fileno(), size, offset)
                if time.monotonic() - self._touched_at[shard] > _TOUCH_EVERY_S:
                    self._touched_at[shard] = time.monotonic()
                    os.utime(path)
            except FileNotFoundError:
                self._ensure(shard)
                continue
            except OSError as error:
                raise DataError(f"data.path: {path} cannot be read: {error.strerror}") from None
            if len(content) < size:
                raise DataError(f"data.path: {path} was cut off while it was in use: remove {self.folder.parent}")
            return content

    def prefetch(self, shard: int, offset: int, size: int) -> None:
        """Does nothing: fetched shards are in the page cache, and `follow` fetches the later ones."""

    def follow(self, order: Order, epoch: int, position: int) -> None:
        """Fetch ahead what `order` needs from this position on; called as reading goes on."""
        with self._changed:
            self._next_shards.advance(order, epoch, position)
            self._changed.notify_all()
            while len(self._threads) < min(_NUM_THREADS, len(self.shards)):
                self._threads.append(threading.Thread(target=self._run_thread, name="fetch", daemon=True))
                self._threads[-1].start()

    def close(self) -> None:
        """End the threads, and the reads that wait for a shard; let go of the folder."""
        self._closed = True
        self._lease.close()

    def _check_stopped(self) -> None:
        if self._closed or not threading.main_thread().is_alive():
            raise StoppedError

    def _run_thread(self) -> None:
        with contextlib.suppress(StoppedError):
            while True:
                shard, earlier = self._next()
                try:
                    fetched = self._ensure(shard, earlier)
                except DataUnavailableError as error:  # the server may be back before the shard is needed
                    _log.warning("a shard was not fetched ahead, and will be tried again: %s", error)
                    self._retry_at_s[shard] = time.monotonic() + _RETRY_AHEAD_S
                    fetched = False
                except DataError:  # see `_ensure`
                    continue
                if not fetched:
                    with self._changed:
                        self._present_shards.discard(shard)
                        self._changed.wait(_LOOK_AGAIN_S)

    def _next(self) -> tuple[int, frozenset[str]]:
        """The first shard ahead that is not known to be there, and the files that are needed before it. Raises StoppedError."""
        with self._changed:
            while True:
                self._check_stopped()
                upcoming = self._next_shards.upcoming(self.limit_bytes)
                for position, shard in enumerate(upcoming):
                    if shard in self._present_shards or shard in self._failed:
                        continue
                    if time.monotonic() < self._retry_at_s.get(shard, 0.0):
                        continue
                    self._present_shards.add(shard)
                    return shard, frozenset(self.shards[before].file for before in upcoming[:position])
                self._changed.wait(_LOOK_AGAIN_S)

    def _ensure(self, shard: int, earlier: frozenset[str] | None = None) -> bool:
        """Fetch a shard unless it is there; whether it is. Ahead of its use only at the cost of files not needed `earlier`.

        Raises:
            DataError: it cannot be fetched, or the folder cannot be used.
            StoppedError: the fetcher was closed.
        """
        here = partial(reported_as, "data.stage", str(self.folder), "write another folder")
        with here(), locked(self._lock_of(self.shards[shard]), self._check_stopped):
            if shard in self._failed:
                raise self._failed[shard]
            try:
                with here():
                    return is_whole(self.folder, self.shards[shard]) or self._fetch(self.shards[shard], earlier)
            except DataError as error:
                # Who reads a shard whose server did not answer while it was fetched ahead tries for itself.
                if earlier is None or not isinstance(error, DataUnavailableError):
                    self._failed[shard] = error
                raise

    def _fetch(self, file: File, earlier: frozenset[str] | None) -> bool:
        not_removed, required = earlier or frozenset(), earlier is None
        # A process that waited for room that others take could wait for ever, since they may wait for its gradients.
        room = self._make_room(file, not_removed) or required
        while room:
            try:
                fetch(self.server, file, self.folder, self._check_stopped)
                return True
            except NoRoomError:
                room = self._make_room(file, not_removed, at_least=file.bytes)
        if required:
            raise DataError(
                f"data.stage: {self.folder} is full, and {format_bytes(file.bytes)} of {self.server.full_path(file.file)} "
                "find no room; free some, lower data.cache_mib, or give another folder"
            )
        return False

    def _make_room(self, file: File, not_removed: frozenset[str], at_least: int = 0) -> bool:
        """Remove the files read longest ago, but for `not_removed`, until `file` fits; nothing where that is not possible.

        `file` counts as if it were there from now on. `at_least` so many bytes are removed.
        """
        with locked(self._lease.folder / "room", self._check_stopped):
            num_bytes = max(self._used() + file.bytes - self.limit_bytes, at_least)
            removable = [(stat.st_mtime_ns, stat.st_size, path) for path, stat in self._present() if path.name not in not_removed]
            if num_bytes > sum(size for _, size, _ in removable):
                return False
            for _, size, path in sorted(removable):
                if num_bytes <= 0:
                    break
                path.unlink(missing_ok=True)
                num_bytes -= size
            part_of(self.folder, file).touch()
        with self._changed:
            self._present_shards = {shard for shard in self._present_shards if self._is_present_or_fetched(self.shards[shard])}
        return True

    def _is_present_or_fetched(self, file: File) -> bool:
        return (self.folder / file.file).exists() or part_of(self.folder, file).exists()

    def _used(self) -> int:
        """Bytes of all shards that are there or on their way; what a killed process had begun is removed."""
        used = 0
        for file in self._files.values():
            part = part_of(self.folder, file)
            if part.exists() and is_locked(self._lock_of(file)):
                used += file.bytes
            else:
                part.unlink(missing_ok=True)
        # Last: what becomes whole meanwhile counts twice rather than not at all.
        return used + sum(stat.st_size for _, stat in self._present())

    def _lock_of(self, file: File) -> Path:
        return self._lease.folder / f"{file.file}.lock"

    def _present(self) -> Iterator[tuple[Path, os.stat_result]]:
        for name in self._files:
            path = self.folder / name
            with contextlib.suppress(FileNotFoundError):
                yield path, path.stat()
