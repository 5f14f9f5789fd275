"""Write one shard of a packed set: read its samples, convert them as the mode says, write an Arrow file.

A shard depends only on the plan, so that any process may write it at any time. Shapes: n samples of the shard.
"""

import json
import os
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # at the top, so that forked processes inherit it
from numpy.typing import NDArray

from trainables.data.decode import UnreadableImageError, decode_image
from trainables.data.index import FORMAT, ROW_COLUMNS, SHARD_COLUMNS, UNFINISHED, VERSION, File, file_sha256
from trainables.data.order import Split
from trainables.data.pack.layout_reader import SplitListing
from trainables.data.pack.modes import Mode
from trainables.data.pack.readers import READERS
from trainables.data.sources.arrow import to_arrow, to_numpy
from trainables.errors import DataError, printable
from trainables.rundir import replacing, write_json

Unreadable = dict[str, str]
"""A line of the report: {"split", "name", "reason"}."""


@dataclass(frozen=True)
class ShardJob:
    """Everything a process needs to write one shard of `dest`."""

    dest: Path
    split: Split
    number: int
    source: Path
    kind: str
    mode: Mode
    pixels: bool
    check: bool
    """Whether to decode every image, even if it looks complete."""
    split_listing: SplitListing

    @property
    def file(self) -> str:
        return f"{self.split}-{self.number:05}.arrow"

    @property
    def done(self) -> Path:
        """The file that marks the shard as finished, and describes it."""
        return self.dest / UNFINISHED / f"{self.split}-{self.number:05}.json"

    def finished(self) -> tuple[File, list[Unreadable]] | None:
        """Return the file and the unreadable images if an earlier process has finished this shard, else None."""
        try:
            stored = json.loads(self.done.read_bytes())
            file = File.model_validate(stored["file"])
            whole = (self.dest / file.file).stat().st_size == file.bytes
            return (file, stored["unreadable"]) if whole else None
        except (OSError, ValueError, KeyError):
            return None

    def is_whole(self) -> bool:
        """Whether it is finished without unreadable images; if there were any, the user may have fixed them since."""
        finished = self.finished()
        return finished is not None and not finished[1]


def write_shard(job: ShardJob) -> int:
    """Write one shard, then the file that marks it as finished. Return its number of samples, readable or not.

    The Arrow file has one uncompressed record batch, so that it contains every image's bytes unchanged.

    Raises DataError if this machine does not see the source, OSError if the disk is full or fails.
    """
    if not job.source.exists():
        raise DataError(f"{job.source} is not visible to {socket.gethostname()}: give a source that all nodes share")
    data, ends, names, numbers = bytearray(), [0], list[bytes](), list[int]()
    unreadable: list[Unreadable] = []
    samples = READERS[job.kind](job.source).read(job.split_listing.locations)
    for label, (name, sample) in zip(job.split_listing.labels_N.tolist(), samples, strict=True):
        try:
            if isinstance(sample, UnreadableImageError):
                raise sample
            if job.check:
                decode_image(sample, reduced=job.mode.shrinks)
            content, width, height = job.mode.apply(sample, job.pixels)
        except UnreadableImageError as error:
            unreadable.append({"split": job.split, "name": printable(name), "reason": str(error)})
            continue
        data += content
        ends.append(len(data))
        names.append(printable(name).encode())
        numbers += (label, width, height)
    label_n, *sizes = np.array(numbers, dtype=np.int64).reshape(-1, 3).T
    name_ends = np.cumsum([0, *map(len, names)], dtype=np.int32)
    columns = [
        _texts(pa.large_binary(), np.array(ends, dtype=np.int64), data),
        to_arrow(label_n),
        _texts(pa.string(), name_ends, b"".join(names)),
        *(to_arrow(size_n.astype(np.int32)) for size_n in sizes),
    ]
    batch = pa.record_batch(columns, names=list(SHARD_COLUMNS))
    file = write_batch(job.dest / job.file, batch.replace_schema_metadata({"format": f"{FORMAT} {VERSION}"}))
    write_json(job.done, {"file": file.model_dump(), "unreadable": unreadable})
    return len(job.split_listing.locations)


def _texts(kind: Any, ends: NDArray[Any], joined: bytes | bytearray) -> Any:
    return pa.Array.from_buffers(kind, len(ends) - 1, [None, pa.py_buffer(ends), pa.py_buffer(joined)])


def shard_rows(path: Path) -> NDArray[np.int64]:
    """Return ROW_COLUMNS of a shard (5, n): each image's label, the position of its bytes in the file, and its size in pixels."""
    with pa.memory_map(os.fsencode(path)) as mapped:
        whole = mapped.read_buffer()
        batch = pa.ipc.open_file(whole).get_batch(0)
        if not len(batch):
            return np.zeros((len(ROW_COLUMNS), 0), dtype=np.int64)
        _, ends, data = batch.column("image").buffers()
        ends_n = np.frombuffer(ends, dtype=np.int64)[: len(batch) + 1]
        label_n, *sizes = (to_numpy(batch.column(name), ROW_COLUMNS[name]) for name in ("label", "width", "height"))
        return np.stack([label_n, ends_n[:-1] + data.address - whole.address, np.diff(ends_n), *sizes])


def write_rows(path: Path, rows: list[NDArray[np.int64]]) -> File:
    """Write the rows of a split, given those of its shards, each (5, n)."""
    joined = np.concatenate(rows, axis=1)
    columns = [to_arrow(column.astype(kind)) for column, kind in zip(joined, ROW_COLUMNS.values(), strict=True)]
    return write_batch(path, pa.record_batch(columns, names=list(ROW_COLUMNS)))


def write_batch(path: Path, batch: Any) -> File:
    """Write one record batch as an Arrow file."""
    with replacing(path) as temporary:
        with open(temporary, "wb") as file, pa.ipc.new_file(file, batch.schema) as writer:
            writer.write_batch(batch)
        size, sha256 = temporary.stat().st_size, file_sha256(temporary)
    return File(file=path.name, rows=len(batch), bytes=size, sha256=sha256)
