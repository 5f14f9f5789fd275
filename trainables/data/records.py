"""A packed set: images in a few large Arrow files instead of a million small ones (docs/records.md describes the format).

`index.json` says what there is, `SPLIT.rows.arrow` where every sample lies, and the shards hold the samples themselves, complete
with labels and names, for any Arrow reader. A worker opens a split by reading two files, whatever its number of shards.

Shapes: N samples of the split, S shards, R samples asked for, H=W pixels where all images have one size, C=3 channels.
"""

from __future__ import annotations

import errno
import hashlib
import itertools
import os
import sys
import threading
import weakref
from bisect import bisect_right
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, ValidationError

from trainables.config import Section
from trainables.data.decode import Sample, UnreadableImageError
from trainables.data.order import Split
from trainables.errors import DataError

INDEX = "index.json"
UNFINISHED = ".pack"
"""The folder in which an unfinished `distill pack` keeps what it has done."""
UNREADABLE = "unreadable.jsonl"
FORMAT: Final = "raydistill records"
VERSION: Final = 1
SHARD_COLUMNS = ("image", "label", "name", "width", "height")
ROW_COLUMNS = {"label": "int64", "offset": "int64", "size": "int64", "width": "int32", "height": "int32"}

_NO_VERSION = 10**6
_LONGEST_REASON = 200  # characters

_Count = Annotated[int, Field(ge=0, lt=2**62)]


class File(Section):
    """One file of a packed set; `sha256` in hexadecimal, as `sha256sum` prints it."""

    file: Annotated[str, Field(pattern=r"^\w[\w.-]*$")]
    rows: _Count
    bytes: _Count
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class SplitIndex(Section):
    """One split: the file of its rows, and its shards in the order of the rows."""

    rows: File
    shards: tuple[File, ...]


class Index(Section):
    """`index.json`: what a packed set holds and how it was made."""

    format: Literal["raydistill records"] = FORMAT
    version: Literal[1] = VERSION
    image: Literal["file", "pixels"]
    """What the column `image` holds: an encoded image file, or height × width × 3 bytes of RGB."""
    mode: dict[str, int]
    source: dict[str, str]
    raydistill: str
    num_unreadable: _Count
    classes: tuple[str, ...]
    splits: dict[Literal["train", "val"], SplitIndex]

    def files(self) -> list[File]:
        """Every file but the index itself."""
        return [file for split in self.splits.values() for file in (split.rows, *split.shards)]


def is_records(path: str) -> bool:
    """Whether a folder is a packed set, or was to become one; an image folder that has a file of the index's name is not."""
    root = Path(path).expanduser()
    return any((root / name).exists() for name in (INDEX, UNFINISHED)) and not (root / "train").is_dir()


def read_index(root: Path) -> Index:
    """The index of a packed set.

    Raises:
        DataError: there is none, it is damaged, or of a format that this version does not know.
    """
    path = root / INDEX
    if not path.exists() and (root / UNFINISHED).exists():
        raise DataError(f"data.path: {root} is not packed to the end: the same `distill pack` once more goes on")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"data.path: {path} cannot be read: {error.strerror}; give a folder that `distill pack` made") from None
    return parse_index(content, str(path))


def parse_index(content: bytes, path: str) -> Index:
    """The index whose JSON is `content`, read at `path`. Raises DataError as `read_index` does."""
    try:
        index = Index.model_validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        where, value = ".".join(map(str, first["loc"])), first["input"]
        if where == "version" and isinstance(value, int) and VERSION < value < _NO_VERSION:
            raise DataError(f"data.path: {path} is of version {value}, and this raydistill reads {VERSION}: update it") from None
        reason = f"{where}: {first['msg']}" if where else str(first["msg"]).splitlines()[0]
        reason = " ".join(reason.split())[:_LONGEST_REASON]  # keys are whatever the file says
        raise DataError(f"data.path: {path} is not the index of a packed set ({reason}); pack it again") from None
    if missing := {"train", "val"} - set(index.splits):
        raise DataError(f"data.path: {path} has no split {missing.pop()}; pack it again")
    return index


def file_sha256(path: Path) -> str:
    """SHA-256 of a file in hexadecimal; the interpreter is free meanwhile.

    SHA-256 because `sha256sum` is on every machine, and most CPUs hash it faster than disks read. Raises OSError.
    """
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_file(root: Path, file: File) -> str | None:
    """What is wrong with a file of a packed set: None where size and checksum are those of the index. Reads all of it."""
    try:
        if (size := os.stat(root / file.file).st_size) != file.bytes:
            return f"{root / file.file} has {size:,} bytes, and its index says {file.bytes:,}"
        if file_sha256(root / file.file) != file.sha256:
            return f"{root / file.file} has another checksum than its index says"
    except OSError as error:
        return f"{root / file.file} cannot be read: {error.strerror}"
    return None


class ShardReader(Protocol):
    """Where a split's shards lie: on this machine, or further away. Reading is safe from several threads at once."""

    def read(self, shard: int, offset: int, size: int) -> bytes:
        """`size` bytes of a shard from `offset` on. Raises DataError where it does not have them."""

    def expect(self, shard: int, offset: int, size: int) -> None:
        """These bytes will be read next: the disk may bring them meanwhile. Raises DataError as `read` does."""

    def path(self, shard: int) -> Path:
        """A local file that holds the whole shard."""


class LocalShards:
    """Shards in a folder, read by position.

    Not memory-mapped: where a disk fails, or a file is cut off under a running job, touching mapped memory kills the process
    (SIGBUS), and a read is an error that can be told. The copy takes 1% of the time that decoding takes. A shard that is replaced
    once it was read from is still the old one; before, it is an error.
    """

    def __init__(self, root: Path, shards: tuple[File, ...]) -> None:
        self._root, self._shards = root, shards
        self._handles: list[int | None] = [None] * len(shards)
        self._identities: list[tuple[int, int]] = []  # of the files that were there when the source was opened
        self._lock = threading.Lock()
        weakref.finalize(self, _close, self._handles)
        for shard in shards:
            try:
                found = os.stat(root / shard.file)
            except OSError as error:
                raise _unreadable(root / shard.file, error) from None
            self._check_size(shard, found.st_size)
            self._identities.append(_identity(found))

    def __reduce__(self) -> tuple[Any, ...]:
        return LocalShards, (self._root, self._shards)

    def path(self, shard: int) -> Path:
        return self._root / self._shards[shard].file

    def read(self, shard: int, offset: int, size: int) -> bytes:
        handle = self._handles[shard]
        try:
            content = os.pread(self._open(shard) if handle is None else handle, size, offset)
            while len(content) < size and (more := os.pread(self._open(shard), size - len(content), offset + len(content))):
                content += more  # a read ends early at 2 GiB, and where a signal comes
        except OSError as error:
            raise _unreadable(self.path(shard), error) from None
        if len(content) < size:
            raise DataError(f"data.path: {self.path(shard)} was cut off while it was in use; copy or pack it again")
        return content

    def expect(self, shard: int, offset: int, size: int) -> None:
        if sys.platform == "linux":
            try:
                os.posix_fadvise(self._open(shard), offset, size, os.POSIX_FADV_WILLNEED)
            except OSError as error:
                raise _unreadable(self.path(shard), error) from None

    def _open(self, shard: int) -> int:
        with self._lock:
            handle = self._handles[shard]
            if handle is None:
                handle = _open(self.path(shard))
                try:
                    found = os.fstat(handle)
                    self._check_size(self._shards[shard], found.st_size)
                    if _identity(found) != self._identities[shard]:
                        path = self.path(shard)
                        raise DataError(f"data.path: {path} was replaced while it was in use; resume once the set is whole again")
                except DataError:
                    os.close(handle)
                    raise
                self._handles[shard] = handle
            return handle

    def _check_size(self, shard: File, size: int) -> None:
        if size != shard.bytes:
            path = self._root / shard.file
            raise DataError(f"data.path: {path} has {size:,} bytes, and its index says {shard.bytes:,}; copy or pack it again")


class RecordsSource:
    """One split of a packed set; see `open_records`. In memory are 32 bytes a sample and nothing else."""

    def __init__(self, root: Path, index: Index, split: Split, shards: ShardReader) -> None:
        part = index.splits[split]
        table = _read_rows(root / part.rows.file, part.rows)
        self.classes = index.classes
        self.labels_N, self._offsets_N, self.sizes_N, self.widths_N, self.heights_N = (table[name] for name in ROW_COLUMNS)
        self._ends_S = list(itertools.accumulate(shard.rows for shard in part.shards))
        self._shards, self._pixels = shards, index.image == "pixels"
        self._check(root / part.rows.file, part)
        side = int(self.widths_N[0])
        alike = self._pixels and side > 0 and bool((self.widths_N == side).all() and (self.heights_N == side).all())
        self.size = side if alike else None
        """Height and width of every image where they are stored as pixels of one size; see `read_batch`."""

    def __len__(self) -> int:
        return len(self.labels_N)

    @property
    def shard_sizes(self) -> list[int]:
        """Samples of each shard in stored order."""
        return [stop - start for start, stop in itertools.pairwise((0, *self._ends_S))]

    def place(self, index: int) -> tuple[int, int]:
        """The shard that holds a sample, and its row there."""
        shard = bisect_right(self._ends_S, index)
        return shard, index - (self._ends_S[shard - 1] if shard else 0)

    def name(self, index: int) -> str:
        """What the source of the packed set called the sample; its place where the shard is damaged."""
        shard, row = self.place(index)
        path = self._shards.path(shard)
        return _name(path, row) or f"{path.name}[{row}]"

    def expect(self, indices_R: NDArray[np.int64]) -> None:
        """These samples (R,) will be read next, one after the other: the disk may bring them side by side meanwhile.

        Where nothing of a shard is in the page cache, two threads that decode photos get 1.13 times as many
        (docs/where-the-bytes-live.md); where all of it is, this costs microseconds. Raises DataError as `read` does.
        """
        for index in indices_R.tolist():
            self._shards.expect(bisect_right(self._ends_S, index), self._offsets_N.item(index), self.sizes_N.item(index))

    def read(self, index: int) -> Sample:
        """The encoded image file, or the pixels (H, W, 3).

        Raises DataError where the shard cannot be read, or is shorter than its index says.
        """
        content = self._shards.read(bisect_right(self._ends_S, index), self._offsets_N.item(index), self.sizes_N.item(index))
        if not self._pixels:
            return content
        shape = self.heights_N.item(index), self.widths_N.item(index), 3
        if not all(shape):
            raise UnreadableImageError("no pixels")
        return np.frombuffer(content, dtype=np.uint8).reshape(shape)

    def read_batch(self, indices_R: NDArray[np.int64], out_RHWC: NDArray[np.uint8]) -> None:
        """The pixels of these samples, where all have one `size`, into `out_RHWC`; neighbours in a shard are read at once.

        Raises DataError as `read` does.
        """
        size, row = out_RHWC[:1].nbytes, 0
        wanted = zip(indices_R.tolist(), self._offsets_N[indices_R].tolist(), strict=True)
        runs: list[list[int]] = []  # shard, offset, samples
        for index, offset in wanted:
            shard = bisect_right(self._ends_S, index)
            if runs and runs[-1][0] == shard and runs[-1][1] + runs[-1][2] * size == offset:
                runs[-1][2] += 1
            else:
                runs.append([shard, offset, 1])
        for shard, offset, count in runs:
            content = self._shards.read(shard, offset, count * size)
            out_RHWC[row : row + count] = np.frombuffer(content, dtype=np.uint8).reshape(count, *out_RHWC.shape[1:])
            row += count

    def _check(self, path: Path, part: SplitIndex) -> None:
        """Every row lies inside its shard, so that no read needs to ask again. Raises DataError."""
        whole = sum(shard.rows for shard in part.shards) == len(self)
        if whole:
            bytes_N = np.repeat([shard.bytes for shard in part.shards], [shard.rows for shard in part.shards]).astype(np.int64)
            whole = (
                (self.labels_N >= 0) & (self.labels_N < len(self.classes)) & (self.widths_N >= 0) & (self.heights_N >= 0)
                & (self._offsets_N >= 0) & (self.sizes_N >= 0) & (self.sizes_N <= bytes_N)
                & (self._offsets_N <= bytes_N - self.sizes_N)
            ).all()  # fmt: skip
        if whole and self._pixels:
            whole = (self.sizes_N == self.widths_N.astype(np.int64) * self.heights_N * 3).all()
        if not whole:
            raise DataError(f"data.path: {path} does not agree with its index; pack it again")
        if not len(self):
            raise DataError(f"data.path: {path} holds no images; pack it again")


def open_records(path: str, split: Split) -> RecordsSource:
    """One split of the packed set in the folder `path`.

    Raises DataError where it is unfinished, a file is missing, has another size than the index says, or is damaged.
    """
    root = Path(path).expanduser()
    index = read_index(root)
    return RecordsSource(root, index, split, LocalShards(root, index.splits[split].shards))


def _read_rows(path: Path, file: File) -> dict[str, NDArray[Any]]:
    """The columns of a split's rows, in memory: they are all that a worker keeps of the set."""
    import pyarrow as pa

    try:
        content = path.read_bytes()
    except OSError as error:
        raise _unreadable(path, error) from None
    if len(content) != file.bytes or hashlib.sha256(content).hexdigest() != file.sha256:
        raise DataError(f"data.path: {path} is not the file that its index tells of; copy or pack it again")
    try:
        batch = pa.ipc.open_file(pa.py_buffer(content)).get_batch(0)
        batch.validate()
        if {column.name: str(column.type) for column in batch.schema} != ROW_COLUMNS or len(batch) != file.rows:
            raise pa.ArrowInvalid("other columns")
        buffers = {name: batch.column(name).buffers()[1] for name in ROW_COLUMNS}  # `to_numpy` would import pandas
        if any(batch.column(name).null_count or batch.column(name).offset for name in ROW_COLUMNS):
            raise pa.ArrowInvalid("gaps")
        return {name: np.frombuffer(buffers[name], dtype=ROW_COLUMNS[name], count=len(batch)) for name in ROW_COLUMNS}
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError(f"data.path: {path} holds no rows ({str(error).splitlines()[0]}); pack it again") from None


def _name(path: Path, row: int) -> str | None:
    """A sample's name from its shard; None where that is damaged."""
    import pyarrow as pa

    try:
        with pa.OSFile(str(path)) as file:
            options = pa.ipc.IpcReadOptions(included_fields=[SHARD_COLUMNS.index("name")])
            names = pa.ipc.open_file(file, options=options).get_batch(0).column("name")
        names.validate(full=True)
        return str(names[row].as_py())
    except (pa.ArrowException, OSError, IndexError, KeyError, ValueError):
        return None


def _identity(found: os.stat_result) -> tuple[int, int]:
    """What is another one where a file was replaced or written to."""
    return found.st_ino, found.st_mtime_ns


def _unreadable(path: Path, error: OSError) -> DataError:
    return DataError(f"data.path: {path} cannot be read: {error.strerror}; copy or pack it again")


def _open(path: Path) -> int:
    """A file for reading; the limit on open files is raised where it is in the way: a large set has a thousand shards."""
    try:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def _close(handles: list[int | None]) -> None:
    for handle in handles:
        if handle is not None:
            os.close(handle)
