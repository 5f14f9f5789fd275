"""Shards of a remote packed set in a node's cache: prefetched before their use, and evicted least recently used first.

A file is opened for every read, so that an evicted one takes no disk space; a reader that still needs it fetches it again.

Shapes: B positions, S shards of the split.
"""

import contextlib
import copy
import logging
import os
import threading
import time
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from trainables.config.data import shuffle_window
from trainables.data.index import File, Index
from trainables.data.order import Order, Split
from trainables.data.storage.cache import Cache, reported_as
from trainables.data.storage.free_space import format_bytes
from trainables.data.storage.origin import Origin, StoppedError
from trainables.errors import DataError, DataUnavailableError

_NUM_THREADS = 4  # shards fetched at the same time
_TOUCH_EVERY_S = 1.0
_POLL_S = 1.0
_PREFETCH_RETRY_S = 10.0  # pause before retrying a prefetch when the server did not answer
_SPAN = 4096  # positions looked up together: takes milliseconds, and a shard has about as many samples
_MAX_SPANS = 1024  # spans cached
_log = logging.getLogger("raydistill")


class Upcoming:
    """The shards that an order needs from `at`, an (epoch, position), on. Not thread-safe: callers lock."""

    def __init__(self, shards: Sequence[File], order: Order, *, repeats: bool) -> None:
        """`repeats`: the next epoch follows immediately, as in training but not in validation."""
        self.order, self.at = order, (0, 0)
        self._ahead = copy.copy(order)  # an order caches its last epoch, and this copy is ahead of the reader's
        self._repeats = repeats
        self._bytes_S = [shard.bytes for shard in shards]
        self._ends_S = np.cumsum([shard.rows for shard in shards], dtype=np.int64)
        self._found = lru_cache(_MAX_SPANS)(self._find)

    def shards(self, max_bytes: int) -> list[int]:
        """Return the next shards by first use, as many as fit into `max_bytes` but at least one, up to an epoch ahead."""
        epoch, position = self.at
        size = self.order.num_shown
        found = dict.fromkeys(self._find(epoch, position))  # the rest of the current span
        later = {epoch: range((position // _SPAN + 1) * _SPAN, size, _SPAN)}
        if self._repeats:
            later[epoch + 1] = range(0, position, _SPAN)
        for each, begins in later.items():
            for begin in begins:
                if len(found) == len(self._bytes_S) or sum(self._bytes_S[shard] for shard in found) >= max_bytes:
                    break
                found |= dict.fromkeys(self._found(each, begin))
        total_bytes_S = np.cumsum([self._bytes_S[shard] for shard in found])
        return list(found)[: max(1, int(np.searchsorted(total_bytes_S, max_bytes, side="right")))]

    def _find(self, epoch: int, begin: int) -> list[int]:
        """Return the shards of a span's positions from `begin` on."""
        positions_B = np.arange(begin, min((begin // _SPAN + 1) * _SPAN, self.order.num_shown))
        shards_B = np.searchsorted(self._ends_S, self._ahead.at(epoch, positions_B), side="right")
        shards, first_use = np.unique(shards_B, return_index=True)
        return shards[np.argsort(first_use)].tolist()  # type: ignore[no-any-return]


class RemoteShards:
    """The shards of one split, shared by all processes of the node.

    Reading a missing shard fetches it. After the first call of `follow`, threads prefetch shards.
    """

    def __init__(self, origin: Origin, cache: Cache, index: Index, split: Split, *, reopen: tuple[Any, ...]) -> None:
        """`reopen`: the function with which another process opens them, and its arguments."""
        self.origin, self.cache, self.shards = origin, cache, index.splits[split].shards
        self._reopen = reopen
        self._largest_val_bytes = max((shard.bytes for shard in index.splits["val"].shards), default=0)
        self._files = {file.file for part in index.splits.values() for file in part.shards}
        self._touched_at = [0.0] * len(self.shards)
        self._upcoming: Upcoming | None = None
        self._repeats = split == "train"
        self._changed = threading.Condition()
        self._fetched_now: set[int] = set()
        self._failed: dict[int, DataError] = {}  # raised when the shard is read
        self._threads: list[threading.Thread] = []
        self._closed = False

    def __reduce__(self) -> tuple[Any, ...]:
        return self._reopen

    def check_room(self, shuffle: str) -> None:
        """Refuse an order that would fetch shards repeatedly. `shuffle` is `data.shuffle`, or `none` for validation.

        Raises DataError with the cache size that the order needs, and the actual one.
        """
        room_bytes, num_samples = self.cache.room_bytes(), sum(shard.rows for shard in self.shards)
        total_bytes, largest_bytes = sum(shard.bytes for shard in self.shards), max(shard.bytes for shard in self.shards)
        needed_bytes = largest_bytes if shuffle == "none" else total_bytes
        if window := shuffle_window(shuffle):  # a window may begin and end in the middle of a shard
            needed_bytes = min(total_bytes, total_bytes * window // num_samples + 2 * largest_bytes)
        # validation reads between epochs, and must not evict what training needs
        val_bytes = self._largest_val_bytes if self._repeats else 0
        needed_bytes += val_bytes
        if needed_bytes <= room_bytes:
            return
        what = (
            f"data.shuffle: {shuffle} over {self.origin.path} needs a cache of {format_bytes(needed_bytes)}, "
            f"more than the {format_bytes(room_bytes)} of the one in {self.cache.folder}"
        )
        samples = (room_bytes - val_bytes - 2 * largest_bytes) * num_samples // total_bytes
        smaller = f"data.shuffle=window({samples}) or smaller, or " if shuffle != "none" and samples > 0 else ""
        raise DataError(f"{what}; write {smaller}a larger data.cache_mib, or a folder with more room as data.stage")

    def path(self, shard: int) -> Path:
        """Return the path of the shard's local file, which may not exist."""
        return self.cache.folder / self.shards[shard].file

    def read(self, shard: int, offset: int, size: int) -> bytes:
        """Read `size` bytes of a shard from `offset` on; waits until the shard is fetched.

        Raises DataError if it cannot be fetched, does not match the index, or does not fit on the disk.
        """
        path = self.path(shard)
        while True:
            try:
                with open(path, "rb", buffering=0) as file:
                    content = os.pread(file.fileno(), size, offset)
                    if time.monotonic() - self._touched_at[shard] > _TOUCH_EVERY_S:
                        self._touched_at[shard] = time.monotonic()
                        os.utime(file.fileno())
            except FileNotFoundError:
                self._ensure(shard)
                continue
            except OSError as error:
                raise DataError(f"data.path: {path} cannot be read: {error.strerror}") from None
            if len(content) < size:
                raise DataError(f"data.path: {path} was truncated while in use; remove {self.cache.folder.parent}")
            return content

    def follow(self, order: Order, epoch: int, position: int) -> None:
        """Prefetch what `order` needs from this position on; called repeatedly as reading proceeds."""
        with self._changed:
            if self._upcoming is None or self._upcoming.order is not order:
                self._upcoming = Upcoming(self.shards, order, repeats=self._repeats)
            at, self._upcoming.at = self._upcoming.at, (epoch, position)
            if (epoch, position // _SPAN) != (at[0], at[1] // _SPAN):
                self._changed.notify_all()
            while len(self._threads) < min(_NUM_THREADS, len(self.shards)):
                self._threads.append(threading.Thread(target=self._prefetch, name="fetch", daemon=True))
                self._threads[-1].start()

    def close(self) -> None:
        """Release the files, and end the threads and the reads that wait for a shard."""
        self._closed = True
        self.cache.close()

    def _check_stopped(self) -> None:
        if self._closed or not threading.main_thread().is_alive():
            raise StoppedError

    def _prefetch(self) -> None:
        """Until `close`, repeatedly fetch the first upcoming shard that is missing."""
        with contextlib.suppress(StoppedError):
            while True:
                self._check_stopped()
                with self._changed:
                    upcoming = self._upcoming.shards(self.cache.limit_bytes) if self._upcoming else []
                    shard = next(filter(self._is_missing, upcoming), None)
                    if shard is None:
                        self._changed.wait(_POLL_S)
                        continue
                    self._fetched_now.add(shard)
                pause_s = 0.0
                try:
                    if not self._ensure(shard, upcoming[: upcoming.index(shard)]):
                        pause_s = _POLL_S
                except DataUnavailableError as error:  # the server may be back before the shard is needed
                    _log.warning("a shard could not be prefetched, will retry: %s", error)
                    pause_s = _PREFETCH_RETRY_S
                except DataError:  # raised again when the shard is read
                    pause_s = _POLL_S
                with self._changed:
                    if pause_s:
                        self._changed.wait(pause_s)
                    self._fetched_now.discard(shard)

    def _is_missing(self, shard: int) -> bool:
        file = self.shards[shard]
        return not (shard in self._fetched_now or shard in self._failed or self.cache.has(file.file, file.bytes))

    def _ensure(self, shard: int, needed_before: list[int] | None = None) -> bool:
        """Fetch a shard if it is missing; return whether it is here. A prefetch evicts no shards that are `needed_before`.

        Raises:
            DataError: it cannot be fetched, or the folder cannot be used.
            StoppedError: the source was closed.
        """
        file, ahead = self.shards[shard], needed_before is not None
        removable = self._files - {self.shards[before].file for before in needed_before or ()}

        def fetch(part: Path) -> None:
            if shard in self._failed:
                raise self._failed[shard]
            try:
                self.origin.fetch(file, part, self._check_stopped)
            except DataError as error:
                # if the server did not answer a prefetch, reading the shard tries again
                if not (ahead and isinstance(error, DataUnavailableError)):
                    self._failed[shard] = error
                raise

        with reported_as("data.stage", str(self.cache.folder), "write another folder"):
            # waiting for other processes to free space could deadlock, since they may wait for this rank's gradients
            is_here = self.cache.ensure(
                file.file, file.bytes, fetch, removable=removable, required=not ahead, check_stopped=self._check_stopped
            )
        if not is_here and not ahead:
            raise DataError(
                f"data.stage: {self.cache.folder} has no room for the {format_bytes(file.bytes)} of "
                f"{self.origin.full_path(file.file)}; free some space, lower data.cache_mib, or give another folder"
            )
        return is_here
