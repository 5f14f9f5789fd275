"""Parquet files as on Hugging Face: a column of struct<bytes, path> and a label, whose names the file's metadata has."""

import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from trainables.data.decode import UnreadableImageError
from trainables.data.pack.file_kind import not_readable
from trainables.data.pack.layout_reader import (
    LABEL_FIELDS,
    Label,
    LayoutReader,
    Listing,
    Location,
    files_below,
    locate,
    numbered,
    split_files,
    splits_of,
    unnamed_labels,
)
from trainables.errors import DataError
from trainables.notices import notice


class ParquetReader(LayoutReader):
    """A location is a file below the root and a row in it."""

    @staticmethod
    def matches(root: Path) -> bool:
        return bool(files_below(root, r".+\.parquet"))

    def listing(self) -> Listing:
        names: dict[Path, tuple[str, ...]] = {}

        def samples(path: Path) -> Iterator[tuple[Location, Label]]:
            labels, names[path] = _labels(path)
            file = str(path.relative_to(self._root))
            return (((file, row), label) for row, label in enumerate(labels))

        located = locate(self._root, split_files(self._root, files_below(self._root, r".+\.parquet"), "Parquet files"), samples)
        first, classes = next(iter(names.items()))
        if other := next((path for path in names if names[path] != classes), None):
            raise DataError(f"{other} has other class names than {first}; give the files of one data set")
        if not classes:
            return numbered(self._root, located)
        for labels in located.labels.values():
            if unknown := sorted({str(label) for label in labels} - {str(n) for n in range(len(classes))}):
                raise unnamed_labels(self._root, unknown)
        labels_N = {split: np.array(labels, dtype=np.int64) for split, labels in located.labels.items()}
        return Listing(classes, splits_of(located, labels_N))

    def read(self, locations: Sequence[tuple[str, int]]) -> Iterator[tuple[str, bytes | UnreadableImageError]]:
        for file, group in groupby(locations, key=lambda location: location[0]):
            yield from _images(self._root / file, file, [row for _, row in group])


def _open(path: Path) -> Any:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(path, pre_buffer=False)
    except (pa.ArrowException, OSError) as error:
        with open(path, "rb") as file:
            is_begin = file.read(4) == b"PAR1"
        raise not_readable(path, "a Parquet file", str(error).splitlines()[0], cut_off=is_begin) from None


def _labels(path: Path) -> tuple[list[int | str], tuple[str, ...]]:
    """Every row's label and, where the file's metadata has them, the classes' names. Raises DataError."""
    import pyarrow as pa

    file = _open(path)
    features = _features(file.schema_arrow)
    column = _chosen(path, "class", file.schema_arrow.names, features, "ClassLabel", LABEL_FIELDS)
    _image_column(file.schema_arrow, path)
    try:
        labels = file.read(columns=[column], use_threads=False).column(0)
    except (pa.ArrowException, OSError) as error:
        raise not_readable(path, "a Parquet file", str(error).splitlines()[0]) from None
    kind = labels.type.value_type if pa.types.is_dictionary(labels.type) else labels.type
    if not (pa.types.is_integer(kind) or pa.types.is_boolean(kind) or _is_text(kind)):
        raise DataError(
            f"{path}: the column {column} is of type {kind}, not a class (integers or text); write it as one of these"
        )
    if labels.null_count:
        raise DataError(f"{path}: the column {column} is empty in {labels.null_count} rows; give labelled images")
    values = labels.to_pylist()
    names = features.get(column, {}).get("names") or ()
    return [str(value) for value in values] if pa.types.is_boolean(kind) else values, tuple(map(str, names))


def _is_text(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind))


def _is_bytes(kind: Any) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind))


def _features(schema: Any) -> dict[str, dict[str, Any]]:
    """What Hugging Face's datasets declare of each column in the metadata; of other files nothing."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        return {name: feature for name, feature in features.items() if isinstance(feature, dict)}
    except (KeyError, TypeError, AttributeError, ValueError):
        return {}


def _chosen(
    path: Path, what: str, columns: list[str], features: dict[str, dict[str, Any]], declared: str, usual: Sequence[str]
) -> str:
    """The first column that the metadata declares as such, or else the first of the `usual` ones; others are named in a notice.

    Raises DataError where there is none.
    """
    found = [name for name in columns if features.get(name, {}).get("_type") == declared]
    found = found or [name for name in usual if name in columns]
    if not found:
        raise DataError(f"{path} has no {what} column: name it {', '.join(usual[:-1])} or {usual[-1]}")
    if len(found) > 1:
        notice(f"Parquet: the column {found[0]} is the {what}; not used: {', '.join(found[1:])}")
    return found[0]


def _image_column(schema: Any, path: Path) -> str:
    """The column that the metadata declares as an image, or else the first of struct<bytes, path>, or of bytes."""
    import pyarrow as pa

    usual = []
    for field in schema:
        is_image = pa.types.is_struct(field.type) and field.type.get_field_index("bytes") >= 0
        if _is_bytes(field.type.field("bytes").type if is_image else field.type):
            usual.append(str(field.name))
    if not usual:
        raise DataError(
            f"{path} has no column of images: struct<bytes: binary, path: string>, as Hugging Face's datasets write it"
        )
    features = {name: feature for name, feature in _features(schema).items() if name in usual}
    return _chosen(path, "image", schema.names, features, "Image", usual)


def _images(path: Path, file: str, rows: list[int]) -> Iterator[tuple[str, bytes | UnreadableImageError]]:
    """The images of rows in rising order, a row group in memory at a time."""
    import pyarrow as pa

    parquet = _open(path)
    column = _image_column(parquet.schema_arrow, path)
    sizes = [parquet.metadata.row_group(number).num_rows for number in range(parquet.num_row_groups)]
    starts = np.cumsum([0, *sizes])
    for number, group in groupby(rows, key=lambda row: int(np.searchsorted(starts, row, side="right")) - 1):
        try:
            images = parquet.read_row_group(number, columns=[column], use_threads=False).column(0)
        except (pa.ArrowException, OSError) as error:
            if isinstance(error, OSError) and error.errno:  # the system's; pyarrow's own, of damaged pages, have none
                error.filename = str(path)
                raise
            reason = UnreadableImageError(f"a damaged row group: {str(error).splitlines()[0]}")
            yield from ((f"{file}[{row}]", reason) for row in group)
            continue
        for row in group:
            value = images[row - int(starts[number])].as_py()
            content, inner = (value.get("bytes"), value.get("path")) if isinstance(value, dict) else (value, None)
            name = f"{file}[{row}]" + (f" {inner}" if inner else "")
            yield name, content if content is not None else UnreadableImageError("no bytes, only a path" if inner else "no bytes")
