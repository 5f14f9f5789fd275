"""`data.cache: memory`: a node keeps the image files that its workers have read in memory that they share.

Encoded, not decoded: a decoded photo takes ten times the room, and its crop differs from epoch to epoch, so that a decoder that
decodes the crop alone has less to do than a copy of the whole.
"""

import hashlib
import logging
import threading
from typing import Any

import numpy as np

from trainables.config import DataConfig
from trainables.data.decode import Sample, UnreadableImageError, read_file
from trainables.data.interface import Source
from trainables.data.order import Split
from trainables.data.sources.folder import sampled_sha256
from trainables.data.storage.cache import GRACE_S, Cache, reported_as
from trainables.data.storage.free_space import RAM, format_bytes
from trainables.errors import DataError

_FREE_SHARE = 0.5
_log = logging.getLogger("raydistill")


class CachedSource(Source):
    """A source that is read once per node and sample; see `cached`."""

    def __init__(self, data: DataConfig, split: Split, source: Source, identity: str, cache: Cache) -> None:
        self.classes, self.labels_N = source.classes, source.labels_N
        self._opened_with = data, split, source, identity
        self._source, self.cache = source, cache
        self._warning = threading.Lock()
        self._is_full = False

    def __reduce__(self) -> tuple[Any, ...]:
        return cached, self._opened_with

    def name(self, index: int) -> str:
        return self._source.name(index)

    def fingerprint(self) -> str:
        """See `Source`."""
        return self._source.fingerprint()

    def order_sha256(self) -> str:
        return self._source.order_sha256()

    def close(self) -> None:
        """This process needs the cache no more."""
        self.cache.close()

    def read(self, index: int) -> Sample:
        try:
            return read_file(f"{self.cache.folder}/{index}")
        except UnreadableImageError:  # it is not here
            content = self._source.read(index)
        if isinstance(content, np.ndarray) or self._is_full or self.cache.put(str(index), content):
            return content
        with self._warning:  # of several threads that find it full at the same time
            if not self._is_full:
                self._is_full = True
                limit, (data, split, *_) = format_bytes(self.cache.limit_bytes), self._opened_with
                what = "data.cache: its %s are full: further %s images are read from %s every time"
                _log.warning(what, limit, split, data.path)
        return content


def cached(data: DataConfig, split: Split, source: Source, identity: str | None = None, grace_s: float = GRACE_S) -> CachedSource:
    """`source` with what this node has read of it in shared memory, which all of its processes share.

    All data in that memory takes `data.cache_mib` at most (absent: half of what is free). Images that were preprocessed again
    in place have another cache; a single file that is changed meanwhile may not be read again. `identity`: of the one to share;
    None: computed from the folder's present content. Raises DataError where there is too little memory.
    """
    identity = identity or _identity(data, split, source)
    with reported_as("data.cache", RAM, "leave data.cache out"):
        cache = Cache(RAM, identity, limit_mib=data.cache_mib, share=_FREE_SHARE, grace_s=grace_s)
    if cache.limit_bytes > cache.total_bytes:
        cache.close()
        raise DataError(
            f"data.cache: data.cache_mib={data.cache_mib} is more than the {format_bytes(cache.total_bytes)} "
            f"that are free in {RAM}; lower it"
        )
    return CachedSource(data, split, source, identity, cache)


def _identity(data: DataConfig, split: Split, source: Source) -> str:
    digest = hashlib.sha256(repr((data.path, split, len(source), source.order_sha256())).encode())
    digest.update(sampled_sha256(source))
    return "images-" + digest.hexdigest()[:32]
