"""A packed set at a URI: the index and the rows are read at the start, the shards are fetched to a local folder."""

import errno
import tempfile
import weakref
from functools import partial
from typing import Any

from trainables.config import DataConfig
from trainables.config.data import shuffle_window
from trainables.data.index import INDEX, parse_index
from trainables.data.order import Order, Split
from trainables.data.sources.records import RecordsSource
from trainables.data.storage.cache import Cache, reported_as
from trainables.data.storage.free_space import format_bytes
from trainables.data.storage.origin import Origin
from trainables.data.storage.remote_shards import RemoteShards
from trainables.data.storage.staging import base_folder, set_identity
from trainables.errors import DataError, DataUnavailableError
from trainables.object_store.store import OPENING_S, RETRY_S

_FREE_SHARE = 0.9


class RemoteRecords(RecordsSource):
    """One split of a packed set whose shards are fetched to this node as needed; see `open_remote`."""

    _shards: RemoteShards
    opened_with: tuple[DataConfig, Split, float]

    def follow(self, order: Order, epoch: int, position: int) -> None:
        """Prefetch what `order` needs from this position on; called repeatedly as reading proceeds."""
        self._shards.follow(order, epoch, position)

    def check_room(self, shuffle: str) -> None:
        """Refuse an order that would fetch shards repeatedly. `shuffle` is `data.shuffle`, or `none` for validation.

        Raises DataError with the cache size that the order needs, and the actual one.
        """
        shards, cache = self._shards.shards, self._shards.cache
        room_bytes = cache.room_bytes()
        total_bytes, largest_bytes = sum(shard.bytes for shard in shards), max(shard.bytes for shard in shards)
        needed_bytes = largest_bytes if shuffle == "none" else total_bytes
        if window := shuffle_window(shuffle):  # a window may begin and end in the middle of a shard
            needed_bytes = min(total_bytes, total_bytes * window // len(self) + 2 * largest_bytes)
        # validation reads between epochs, and must not evict what training needs
        val_bytes = self._shards.largest_val_bytes if self.opened_with[1] == "train" else 0
        needed_bytes += val_bytes
        if needed_bytes <= room_bytes:
            return
        what = (
            f"data.shuffle: {shuffle} over {self.opened_with[0].path} needs a cache of {format_bytes(needed_bytes)}, "
            f"more than the {format_bytes(room_bytes)} of the one in {cache.folder}"
        )
        samples = (room_bytes - val_bytes - 2 * largest_bytes) * len(self) // total_bytes
        smaller = f"data.shuffle=window({samples}) or smaller, or " if shuffle != "none" and samples > 0 else ""
        raise DataError(f"{what}; write {smaller}a larger data.cache_mib, or a folder with more room as data.stage")

    def close(self) -> None:
        """Release the shards, and end the threads that fetch them and the reads that wait for one."""
        self._shards.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return open_remote, self.opened_with


def open_remote(data: DataConfig, split: Split, retry_s: float = RETRY_S) -> RemoteRecords:
    """Open one split of the packed set at the URI `data.path`.

    Shards are fetched to `data.stage`, or to the folder for temporary files, and shared by all processes of the node.

    Raises DataError if the server does not answer, has no packed set there, or the folder cannot be used.
    """
    origin = Origin(data.path, OPENING_S)
    try:
        content = origin.read(INDEX)
    except DataUnavailableError:
        raise
    except DataError as error:
        raise DataError(f"{error}; a URI names a packed set: pack the images where they are, with `distill pack`") from None
    index = parse_index(content, origin.full_path(INDEX))
    rows = index.splits[split].rows
    base = tempfile.gettempdir() if data.stage == "none" else base_folder(data.stage)
    use = ("data.stage", base, "give another folder")
    if data.stage == "none":
        use = ("data.path", f"the folder for temporary files {base}", "write data.stage=ram, or a folder")
    with reported_as(*use):
        cache = Cache(base, f"remote-{set_identity(index)}", limit_mib=data.cache_mib, share=_FREE_SHARE)
        try:
            if not cache.ensure(rows.file, rows.bytes, partial(origin.fetch, rows), required=True):
                raise OSError(errno.ENOSPC, "it is full")
        except BaseException:
            cache.close()
            raise
    origin.retry_s = retry_s
    shards = RemoteShards(origin, cache, index, split)
    source = RemoteRecords(cache.folder, index, split, shards, data.labels)
    source.opened_with = data, split, retry_s
    weakref.finalize(source, shards.close)
    return source
