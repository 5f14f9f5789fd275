"""A packed set that lies elsewhere: at s3://, gs://, hdfs://, file:// or on any file system that pyarrow or fsspec opens by URI.

The index and the rows are read at once; `RemoteShards` brings the shards to a folder of this node.
"""

import errno
import hashlib
import tempfile
import weakref
from typing import Any, BinaryIO

from trainables.config import DataConfig
from trainables.config.data import shuffle_window
from trainables.data.index import INDEX, parse_index
from trainables.data.order import Order, Split
from trainables.data.sources.records import RecordsSource
from trainables.data.storage.shard_fetcher import RemoteShards
from trainables.data.storage.shared_folder import folder_bytes, format_bytes, free_bytes, lease_folder, reported_as
from trainables.data.storage.staging import base_folder, is_whole
from trainables.data.storage.transfer import MOST_FETCHES, NoRoomError, fetch, read_with_retries
from trainables.errors import DataError
from trainables.locks import locked
from trainables.object_store.store import OPENING_S, RETRY_S, file_system

_FREE_SHARE = 0.9


class Server:
    """The files below a URI. Credentials and endpoint come from where its file system looks for them: AWS_ENDPOINT_URL, …"""

    def __init__(self, uri: str, retry_s: float) -> None:
        self.uri, self.retry_s = uri.rstrip("/"), retry_s
        self._root: tuple[Any, str] | None = None

    def open(self, name: str) -> BinaryIO:
        if self._root is None:
            self._root = file_system(self.uri)
        system, root = self._root
        return system.open_input_file(f"{root}/{name}")  # type: ignore[no-any-return]

    def full_path(self, name: str) -> str:
        return f"{self.uri}/{name}"

    def read(self, name: str) -> bytes:
        """A small file of which no checksum is known: read until two copies agree, since one may be altered on its way here.

        Raises DataError: `retry_s` was in vain, or all copies differ.
        """

        def attempt() -> bytes:
            with self.open(name) as file:
                return file.read()

        copies = set[bytes]()
        while len(copies) <= MOST_FETCHES:
            if (copy := read_with_retries(self, name, attempt)) in copies:
                return copy
            copies.add(copy)
        raise DataError(
            f"data.path: {self.full_path(name)} is another each of {len(copies)} times that it was read; look for what alters it "
            "between its server and this node"
        )


class RemoteRecords(RecordsSource):
    """One split of a packed set whose shards come to this node as they are needed; see `open_remote`."""

    _shards: RemoteShards
    opened_with: tuple[DataConfig, Split, float]

    def follow(self, order: Order, epoch: int, position: int) -> None:
        """Fetch ahead what `order` needs from this position on; called as reading goes on."""
        self._shards.follow(order, epoch, position)

    def check_room(self, shuffle: str) -> None:
        """Refuse an order that would fetch shards again and again. `shuffle`: `data.shuffle`, or `none` for validation.

        Raises DataError: what it needs at hand, and the size of the cache.
        """
        shards, limit_bytes = self._shards.shards, self._shards.limit_bytes
        total_bytes, largest_bytes = sum(shard.bytes for shard in shards), max(shard.bytes for shard in shards)
        needed_bytes = largest_bytes if shuffle == "none" else total_bytes
        if window := shuffle_window(shuffle):  # which may begin and end in the middle of a shard
            needed_bytes = min(total_bytes, total_bytes * window // len(self) + 2 * largest_bytes)
        # Validation reads between epochs, and training goes on with what it had.
        val_bytes = self._shards.largest_val_bytes if self.opened_with[1] == "train" else 0
        needed_bytes += val_bytes
        if needed_bytes <= limit_bytes:
            return
        what = (
            f"data.shuffle: {shuffle} over {self.opened_with[0].path} needs {format_bytes(needed_bytes)} at hand, "
            f"more than the {format_bytes(limit_bytes)} of the cache in {self._shards.folder}"
        )
        samples = (limit_bytes - val_bytes - 2 * largest_bytes) * len(self) // total_bytes
        smaller = f"data.shuffle=window({samples}) or smaller, or " if shuffle != "none" and samples > 0 else ""
        raise DataError(f"{what}; write {smaller}a larger data.cache_mib, or a folder with more room as data.stage")

    def close(self) -> None:
        """This process needs the shards no more: the threads that fetch end, and reads that wait for a shard."""
        self._shards.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return open_remote, self.opened_with


def open_remote(data: DataConfig, split: Split, retry_s: float = RETRY_S) -> RemoteRecords:
    """One split of the packed set at the URI `data.path`.

    Its shards will come to `data.stage`, or the folder for temporary files, and take `data.cache_mib` there at most. All
    processes of the node share them.

    Raises DataError: the server does not answer, has no packed set there, or the folder cannot be used.
    """
    server = Server(data.path, OPENING_S)
    content = server.read(INDEX)
    index = parse_index(content, server.full_path(INDEX))
    base = tempfile.gettempdir() if data.stage == "none" else base_folder(data.stage)
    use = ("data.stage", base, "give another folder")
    if data.stage == "none":
        use = ("data.path", f"the folder for temporary files {base}", "write data.stage=ram, or a folder")
    with reported_as(*use):
        lease = lease_folder(base, "remote-" + hashlib.sha256(content).hexdigest()[:32])
        folder, rows = lease.folder / "data", index.splits[split].rows
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            with locked(lease.folder / "rows"):
                if not is_whole(folder, rows):
                    fetch(server, rows, folder)
            room_bytes = free_bytes(folder) + folder_bytes(folder)
        except BaseException as error:
            lease.close()
            if isinstance(error, NoRoomError):
                raise OSError(errno.ENOSPC, "it is full") from None
            raise
    server.retry_s = retry_s
    limit_bytes = data.cache_mib << 20 if data.cache_mib else int(_FREE_SHARE * room_bytes)
    shards = RemoteShards(server, lease, index, split, limit_bytes=limit_bytes)
    source = RemoteRecords(folder, index, split, shards)
    source.opened_with = data, split, retry_s
    weakref.finalize(source, shards.close)
    return source
