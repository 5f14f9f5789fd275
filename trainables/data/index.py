"""What a packed set says of itself: `index.json`, and the files that it names (docs/records.md describes the format)."""

import hashlib
import os
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import Field, ValidationError

from trainables.config import Section
from trainables.errors import DataError
from trainables.rundir import expand_home

INDEX = "index.json"
UNFINISHED = ".pack"
"""The folder in which an unfinished `distill pack` keeps what it has done."""
UNREADABLE = "unreadable.jsonl"
FORMAT: Final = "raydistill records"
VERSION: Final = 1
SHARD_COLUMNS = ("image", "label", "name", "width", "height")
ROW_COLUMNS = {"label": "int64", "offset": "int64", "size": "int64", "width": "int32", "height": "int32"}

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
    root = expand_home(path)
    return any((root / name).exists() for name in (INDEX, UNFINISHED)) and not (root / "train").is_dir()


def read_index(root: Path) -> Index:
    """The index of a packed set.

    Raises DataError: there is none, it is damaged, or of a format that this version does not know.
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
        if where == "version" and isinstance(value, int) and value > VERSION:
            raise DataError(f"data.path: {path} is of version {value}, and this raydistill reads {VERSION}: update it") from None
        reason = " ".join(f"{where}: {first['msg']}".removeprefix(": ").split())
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
