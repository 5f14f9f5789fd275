"""The index of a packed set: `index.json`, and the files that it lists (docs/records.md describes the format)."""

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
"""The folder in which `distill pack` records finished shards until the set is complete."""
UNREADABLE = "unreadable.jsonl"
FORMAT: Final = "raydistill records"
VERSION: Final = 1
SHARD_COLUMNS = ("image", "label", "name", "width", "height")
ROW_COLUMNS = {"label": "int64", "offset": "int64", "size": "int64", "width": "int32", "height": "int32"}

_Count = Annotated[int, Field(ge=0, lt=2**62)]


class File(Section):
    """One file of a packed set; `sha256` is hexadecimal, as `sha256sum` prints it."""

    file: Annotated[str, Field(pattern=r"^\w[\w.-]*$")]
    rows: _Count
    bytes: _Count
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class SplitIndex(Section):
    """One split: the file with its rows, and its shards in the order of the rows."""

    rows: File
    shards: tuple[File, ...]


class Index(Section):
    """The contents of `index.json`: what the packed set contains and how it was made."""

    format: Literal["raydistill records"] = FORMAT
    version: Literal[1] = VERSION
    image: Literal["file", "pixels"]
    """The contents of the column `image`: an encoded image file, or height × width × 3 bytes of RGB."""
    mode: dict[str, int]
    source: dict[str, str]
    raydistill: str
    num_unreadable: _Count
    classes: tuple[str, ...]
    splits: dict[Literal["train", "val"], SplitIndex]

    def files(self) -> list[File]:
        """List all files except the index itself."""
        return [file for split in self.splits.values() for file in (split.rows, *split.shards)]


def is_records(path: str) -> bool:
    """Whether a folder is a packed set, finished or not; an image folder that contains an `index.json` is not one."""
    root = expand_home(path)
    return any((root / name).exists() for name in (INDEX, UNFINISHED)) and not (root / "train").is_dir()


def read_index(root: Path) -> Index:
    """Read the index of a packed set.

    Raises DataError if it is missing, damaged, or in a format that this version cannot read.
    """
    path = root / INDEX
    if not path.exists() and (root / UNFINISHED).exists():
        raise DataError(f"data.path: {root} is only partly packed; run the same `distill pack` again to finish it")
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(f"data.path: {path} cannot be read: {error.strerror}; give a folder that `distill pack` made") from None
    return parse_index(content, str(path))


def parse_index(content: bytes, path: str) -> Index:
    """Parse the JSON of an index that was read from `path`. Raises DataError as `read_index` does."""
    try:
        index = Index.model_validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        where, value = ".".join(map(str, first["loc"])), first["input"]
        if where == "version" and isinstance(value, int) and value > VERSION:
            raise DataError(
                f"data.path: {path} has version {value}, and this raydistill reads {VERSION}; update raydistill"
            ) from None
        reason = " ".join(f"{where}: {first['msg']}".removeprefix(": ").split())
        raise DataError(f"data.path: {path} is not the index of a packed set ({reason}); pack it again") from None
    if missing := {"train", "val"} - set(index.splits):
        raise DataError(f"data.path: {path} has no split {missing.pop()}; pack it again")
    return index


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal; releases the GIL. Raises OSError.

    SHA-256, since `sha256sum` is on every machine, and most CPUs compute it faster than disks read.
    """
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def check_file(root: Path, file: File) -> str | None:
    """Return what is wrong with a file of a packed set; None if its size and checksum match the index. Reads all of it."""
    path = root / file.file
    try:
        if (size := os.stat(path).st_size) != file.bytes:
            return f"{path} has {size:,} bytes, and its index says {file.bytes:,}"
        if file_sha256(path) != file.sha256:
            return f"{path} does not match the checksum in its index"
    except OSError as error:
        return f"{path} cannot be read: {error.strerror}"
    return None
