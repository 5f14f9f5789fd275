"""Parquet files as on Hugging Face: a column of struct<bytes, path> and a label, whose names the file's metadata has."""

import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from trainables.data.decode import UnreadableImageError
from trainables.data.pack.layout_reader import (
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

_LABELS = ("label", "labels", "fine_label")


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

        located = locate(split_files(self._root, files_below(self._root, r".+\.parquet"), "Parquet files"), samples)
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
        raise DataError(f"{path} is no whole Parquet file ({str(error).splitlines()[0]}); download it again") from None


def _labels(path: Path) -> tuple[list[int | str], tuple[str, ...]]:
    """Every row's label and, where the file's metadata has them, the classes' names. Raises DataError."""
    import pyarrow as pa

    file = _open(path)
    column, names = _label_column(file.schema_arrow, path)
    _image_column(file.schema_arrow, path)
    try:
        labels = file.read(columns=[column], use_threads=False).column(0)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} is damaged ({str(error).splitlines()[0]}); download it again") from None
    if labels.null_count or not (pa.types.is_integer(labels.type) or pa.types.is_string(labels.type)):
        raise DataError(f"{path}: the column {column} is not a class for each row; give labelled images")
    return labels.to_pylist(), names


def _label_column(schema: Any, path: Path) -> tuple[str, tuple[str, ...]]:
    """The first column that the metadata declares as a class, with the classes' names; or else one by its usual name."""
    try:
        features = json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
        declared = {name: features[name] for name in schema.names if isinstance(features.get(name), dict)}
    except (KeyError, TypeError, AttributeError, ValueError):
        declared = {}
    for name, feature in declared.items():
        if feature.get("_type") == "ClassLabel":
            return name, tuple(map(str, feature.get("names") or ()))
    for name in _LABELS:
        if name in schema.names:
            return name, ()
    raise DataError(f"{path} has no column of classes: name it {', '.join(_LABELS[:-1])} or {_LABELS[-1]}")


def _image_column(schema: Any, path: Path) -> str:
    """The first column of struct<bytes, path>, or of bytes."""
    import pyarrow as pa

    for field in schema:
        is_image = pa.types.is_struct(field.type) and field.type.get_field_index("bytes") >= 0
        kind = field.type.field("bytes").type if is_image else field.type
        if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
            return str(field.name)
    raise DataError(f"{path} has no column of images: struct<bytes: binary, path: string>, as Hugging Face's datasets write it")


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
