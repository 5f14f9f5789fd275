"""`data.cache: memory`: a node keeps the image files that its workers have read in memory that they share.

Encoded, not decoded: a decoded photo takes ten times the room, and its crop differs from epoch to epoch, so that a decoder that
decodes the crop alone has less to do than a copy of the whole.

Shapes: N samples of the split.
"""

import hashlib
import logging
import mmap
import os
import struct
import threading
import weakref
from pathlib import Path
from typing import Any

import numpy as np

from trainables.config import DataConfig
from trainables.data.decode import Sample
from trainables.data.interface import Source
from trainables.data.order import Split
from trainables.data.sources.folder import sampled_sha256
from trainables.data.storage.shared_folder import NO_ROOM, RAM, FolderLease, format_bytes, free_bytes, lease_folder, reported_as
from trainables.errors import DataError
from trainables.locks import locked

_DEFAULT_FRACTION = 0.5  # of the free memory
_SIZE = struct.Struct("q")  # before each sample: its length in bytes
_log = logging.getLogger("raydistill")


class SharedSamples:
    """An append-only file of samples in shared memory, and the offset of each one. Safe across threads and processes.

    A sample is written before its offset is, so that a sample with an offset is complete; a writer that is killed leaves a gap.
    Raises OSError where the files cannot be made.
    """

    def __init__(self, folder: Path, num_samples: int, limit_bytes: int) -> None:
        with locked(folder / "making"):
            self._data = _open_sized(folder / "samples", limit_bytes)
            self._offsets = _open_sized(folder / "offsets", (num_samples + 1) * 8)
            # It is written through its mapping, where memory that is not there kills the process: all of it is taken now.
            # The samples are written by `pwritev`, and no offset points to what did not find room.
            os.posix_fallocate(self._offsets, 0, (num_samples + 1) * 8)
        self._room = folder / "room"
        weakref.finalize(self, _close, (self._data, self._offsets))
        self.limit_bytes = os.fstat(self._data).st_size  # the one of whoever came first
        self._content = memoryview(mmap.mmap(self._data, self.limit_bytes, prot=mmap.PROT_READ))
        # First the bytes in use, then for each sample 1 + its offset, or 0.
        self._offsets_N = np.frombuffer(mmap.mmap(self._offsets, 0), dtype=np.int64)
        self.is_full = False

    def get(self, index: int) -> memoryview | None:
        """A sample, as a view of the shared memory; None where nobody has stored it."""
        entry = int(self._offsets_N[1 + index])
        if not entry:
            return None
        begin = entry - 1 + _SIZE.size
        return self._content[begin : begin + _SIZE.unpack_from(self._content, entry - 1)[0]]

    def put(self, index: int, sample: bytes | memoryview) -> bool:
        """Store a sample; False where there is no room."""
        size = _SIZE.size + len(sample)
        with locked(self._room):
            begin = int(self._offsets_N[0])
            fits = begin + size <= self.limit_bytes
            if fits:
                self._offsets_N[0] = begin + size
        if not fits:
            return False
        try:
            written = os.pwritev(self._data, [_SIZE.pack(len(sample)), sample], begin)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            return False
        if written == size:
            self._offsets_N[1 + index] = begin + 1
        return written == size


class CachedSource(Source):
    """A source that is read once per node and sample; see `cached`."""

    def __init__(self, data: DataConfig, split: Split, source: Source, samples: SharedSamples, lease: FolderLease) -> None:
        self.classes, self.labels_N = source.classes, source.labels_N
        self.folder = lease.folder
        self._data, self._split, self._source, self._samples, self._lease = data, split, source, samples, lease
        self._warning = threading.Lock()

    def __reduce__(self) -> tuple[Any, ...]:
        return cached, (self._data, self._split, self._source, self.folder.name)

    def name(self, index: int) -> str:
        return self._source.name(index)

    def fingerprint(self) -> str:
        """See `Source`."""
        return self._source.fingerprint()

    def order_sha256(self) -> str:
        return self._source.order_sha256()

    def close(self) -> None:
        """This process needs the cache no more."""
        self._lease.close()

    def read(self, index: int) -> Sample:
        sample = self._samples.get(index)
        if sample is not None:
            return sample
        content = self._source.read(index)
        if not self._samples.is_full and not isinstance(content, np.ndarray) and not self._samples.put(index, content):
            self._warn_once()
        return content

    def _warn_once(self) -> None:
        with self._warning:  # of several threads that find it full at the same time
            if self._samples.is_full:
                return
            self._samples.is_full = True
        _log.warning(
            "data.cache: its %s are full: further %s images are read from %s every time",
            format_bytes(self._samples.limit_bytes),
            self._split,
            self._data.path,
        )


def cached(data: DataConfig, split: Split, source: Source, identity: str | None = None) -> CachedSource:
    """`source` with what this node has read of it in shared memory, `data.cache_mib` at most (absent: half of what is free).

    All processes of the node share it, and it is removed a while after the last one has ended. Images that were preprocessed
    anew in place have another; a single file that is changed meanwhile may not be read again. `identity`: of the one to share;
    None: computed from the folder's present content. Raises DataError where there is too little memory.
    """
    identity = identity or _identity(data, split, source)
    with reported_as("data.cache", RAM, "leave data.cache out"):
        lease = lease_folder(RAM, identity)
        try:
            room_bytes = free_bytes(lease.folder)
            limit_bytes = data.cache_mib << 20 if data.cache_mib else int(_DEFAULT_FRACTION * room_bytes)
            if limit_bytes > room_bytes and not (lease.folder / "samples").exists():
                raise DataError(
                    f"data.cache: data.cache_mib={data.cache_mib} is more than the {format_bytes(room_bytes)} "
                    f"that are free in {RAM}; lower it"
                )
            return CachedSource(data, split, source, SharedSamples(lease.folder, len(source), limit_bytes), lease)
        except BaseException:
            lease.close()
            raise


def _identity(data: DataConfig, split: Split, source: Source) -> str:
    digest = hashlib.sha256(repr((data.path, split, len(source), source.order_sha256())).encode())
    digest.update(sampled_sha256(source))
    return "cache-" + digest.hexdigest()[:32]


def _open_sized(path: Path, num_bytes: int) -> int:
    """A file of so many bytes, of which memory is taken as they are written; an older one keeps its size."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    if not os.fstat(handle).st_size:
        os.ftruncate(handle, num_bytes)
    return handle


def _close(handles: tuple[int, ...]) -> None:
    for handle in handles:
        os.close(handle)
