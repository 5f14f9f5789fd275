"""Parquet files as on Hugging Face: a column of struct<bytes, path> and a label, whose names the file's metadata has."""

import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from trainables.data.decode import UnreadableImageError
from trainables.data.interface import NO_LABELS
from trainables.data.pack.file_kind import not_readable
from trainables.data.pack.layout_reader import LABEL_FIELDS, Label, LayoutReader, files_below
from trainables.errors import DataError, first_line, first_three, printable
from trainables.notices import notice

_TEXT = ("string", "large_string", "string_view")
_BYTES = ("binary", "large_binary", "binary_view")
_IMAGE_FIELDS = ("image", "img", "images", "image_bytes", "jpg", "jpeg", "png", "webp")
"""Names of the column that is the image where others have bytes too, such as masks, in order of preference."""


class ParquetReader(LayoutReader):
    """A location is a file below the root and a row in it."""

    what = "Parquet files"
    random_access = False
    _first: tuple[Path, tuple[str, ...]] | None = None
    """The first file, and the names of the classes in its metadata."""

    @classmethod
    def files(cls, root: Path) -> list[Path]:
        return files_below(root, r".+\.parquet")

    def name(self, location: tuple[str, int]) -> str:
        file, row = location
        return printable(f"{file}[{row}]")

    def samples(self, part: Path) -> Iterator[tuple[tuple[str, int], Label | None]]:
        import pyarrow as pa

        file, name = _open(part), str(part.relative_to(self.root))
        _, column, names = _columns(part, file.schema_arrow, self.labels)
        if not self.labels:
            yield from (((name, row), column or None) for row in range(file.metadata.num_rows))
            return
        first, classes = self._first = self._first or (part, names)
        if names != classes:
            raise DataError(f"{part} has other class names than {first}; give the files of one data set")
        self.classes = classes or None
        try:
            labels = file.read(columns=[column], use_threads=False).column(0)
        except (pa.ArrowException, OSError) as error:
            raise not_readable(part, "a Parquet file", first_line(error)) from None
        kind = labels.type.value_type if pa.types.is_dictionary(labels.type) else labels.type
        if not (pa.types.is_integer(kind) or pa.types.is_boolean(kind) or str(kind) in _TEXT):
            raise DataError(
                f"{part}: the column {column} is of type {kind}, not a class (integers or text); write it as one of these"
            )
        if labels.null_count:
            raise DataError(f"{part}: the column {column} is empty in {labels.null_count} rows; give labelled images")
        for row, label in enumerate(labels.to_pylist()):
            yield (name, row), str(label) if isinstance(label, bool) else label

    def read(self, locations: Sequence[tuple[str, int]]) -> Iterator[tuple[str, bytes | UnreadableImageError]]:
        for file, group in groupby(locations, key=lambda location: location[0]):
            yield from _images(self.root / file, file, [row for _, row in group])


def describes_images(path: Path) -> bool:
    """Whether a file is whole and none of its columns has bytes, as that of a table next to tars or files of images."""
    try:
        return not any(_holds_bytes(field.type) for field in _open(path).schema_arrow)
    except DataError:
        return False


def _open(path: Path) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(path, pre_buffer=False)
    except (pa.ArrowException, OSError) as error:
        with open(path, "rb") as file:
            is_begin = file.read(4) == b"PAR1"
        raise not_readable(path, "a Parquet file", first_line(error), cut_off=is_begin) from None


def _columns(path: Path, schema: Any, labels: bool) -> tuple[str, str, tuple[str, ...]]:
    """The columns of the image and of the class, and the classes' names: by Hugging Face's metadata, or usual types and names.

    Raises DataError where there is no such column; without `labels`, that of the class may be missing, and is empty then.
    """
    try:
        declared = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        features = {name: feature for name, feature in declared.items() if isinstance(feature, dict)}
    except (KeyError, TypeError, AttributeError, ValueError):
        features = {}

    def chosen(what: str, kind: str, usual: list[str], advice: str, *, required: bool) -> str:
        declared = [name for name in schema.names if features.get(name, {}).get("_type") == kind]
        found: list[str] = [name for name in declared if kind == "ClassLabel" or name in usual] or usual
        named = [name for name in _IMAGE_FIELDS if name in found] if kind == "Image" else found
        if len(found) > 1 and not named:
            raise DataError(f"{path} has {len(found)} columns of images, {first_three(found)}: name the right one image")
        first, *others = list(dict.fromkeys([*named, *found])) or [""]
        if required and not first:
            raise DataError(f"{path} has no {advice}")
        if required and others:
            notice(f"Parquet: the column {first} is the {what}; not used: {', '.join(others)}")
        return first

    names = f"{', '.join(LABEL_FIELDS[:-1])} or {LABEL_FIELDS[-1]}"
    label = chosen(
        "class",
        "ClassLabel",
        [name for name in LABEL_FIELDS if name in schema.names],
        f"class column: name it {names}; {NO_LABELS}",
        required=labels,
    )
    image = chosen(
        "image",
        "Image",
        [field.name for field in schema if _holds_bytes(field.type)],
        "column of images: struct<bytes: binary, path: string>, as Hugging Face's datasets write it",
        required=True,
    )
    return image, label, tuple(map(str, features.get(label, {}).get("names") or ()))


def _holds_bytes(kind: Any) -> bool:
    """Whether a column of this type has bytes, or a struct of them."""
    is_struct = str(kind).startswith("struct<") and kind.get_field_index("bytes") >= 0
    return str(kind.field("bytes").type if is_struct else kind) in _BYTES


def _images(path: Path, file: str, rows: list[int]) -> Iterator[tuple[str, bytes | UnreadableImageError]]:
    """The images of rows in rising order, a row group in memory at a time."""
    import pyarrow as pa

    parquet = _open(path)
    column, _, _ = _columns(path, parquet.schema_arrow, labels=False)
    starts = np.cumsum([0, *(parquet.metadata.row_group(number).num_rows for number in range(parquet.num_row_groups))])
    for number, group in groupby(rows, key=lambda row: int(np.searchsorted(starts, row, side="right")) - 1):
        try:
            images = parquet.read_row_group(number, columns=[column], use_threads=False).column(0)
        except (pa.ArrowException, OSError) as error:
            if isinstance(error, OSError) and error.errno:  # the system's; pyarrow's own, of damaged pages, have none
                error.filename = str(path)
                raise
            reason = UnreadableImageError(f"a damaged row group: {first_line(error)}")
            yield from ((f"{file}[{row}]", reason) for row in group)
            continue
        for row in group:
            value = images[row - int(starts[number])].as_py()
            content, inner = (value.get("bytes"), value.get("path")) if isinstance(value, dict) else (value, None)
            name = f"{file}[{row}]" + (f" {inner}" if inner else "")
            yield name, content if content is not None else UnreadableImageError("no bytes, only a path" if inner else "no bytes")
