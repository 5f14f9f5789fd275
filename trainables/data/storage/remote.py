"""A packed set at a URI: the index and the rows are read at the start, the shards are fetched to a local folder."""

import errno
import tempfile
import weakref
from functools import partial

from trainables.config import DataConfig
from trainables.data.index import INDEX, Index, parse_index
from trainables.data.order import Split
from trainables.data.sources.records import RecordsSource
from trainables.data.storage.cache import Cache, reported_as
from trainables.data.storage.origin import Origin
from trainables.data.storage.remote_shards import RemoteShards
from trainables.data.storage.staging import base_folder, set_identity
from trainables.errors import DataError, DataUnavailableError
from trainables.object_store.store import OPENING_S, RETRY_S

_FREE_SHARE = 0.9


def open_remote(data: DataConfig, split: Split, retry_s: float = RETRY_S, *, reads_epochs: bool = False) -> RecordsSource:
    """Open one split of the packed set at the URI `data.path`.

    Shards are fetched to `data.stage`, or to the folder for temporary files, and shared by all processes of the node.

    Raises DataError if the server does not answer, has no packed set there, or the folder cannot be used; if it `reads_epochs`,
    also if the folder has too little room for them (see `RemoteShards.check_room`).
    """
    origin = Origin(data.path, OPENING_S)
    try:
        content = origin.read(INDEX)
    except DataUnavailableError:
        raise
    except DataError as error:
        raise DataError(f"{error}; a URI names a packed set: pack the images where they are, with `distill pack`") from None
    index = parse_index(content, origin.full_path(INDEX))
    shards = _open_shards(data, index, split, retry_s)
    if reads_epochs:
        shards.check_room(data.shuffle if split == "train" else "none")
    source = RecordsSource(shards.cache.folder, index, split, shards, data.labels)
    weakref.finalize(source, shards.close)
    return source


def _open_shards(data: DataConfig, index: Index, split: Split, retry_s: float) -> RemoteShards:
    """The shards of a split, whose rows are fetched to this node first. Raises DataError as `open_remote` does."""
    origin, rows = Origin(data.path, OPENING_S), index.splits[split].rows
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
    return RemoteShards(origin, cache, index, split, reopen=(_open_shards, (data, index, split, retry_s)))
