"""Answers on disk: DIR/KEY/EPOCH/ROWS-SHA256.arrow, each part written by one worker, under a name that its content gives it.

So any number of jobs fill one folder at once: what two have written alike is one file, and what overlaps is equal. A part whose
checksum is not its name is as if it were not there.

Shapes: N samples of the training split, B samples asked for, R rows of a part.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from trainables.rundir import replacing
from trainables.teachers.cache.logits_format import Layout

log = logging.getLogger("raydistill")

_ROW_BITS = 32
_EPOCH = "epoch-"
_LEFTOVER_S = 3600.0
_NAME = re.compile(r"[0-9]+-[0-9a-f]{64}\.arrow")
_ARROW = {"float32": pa.float32(), "float16": pa.float16(), "int16": pa.int16(), "int32": pa.int32()}
Columns = dict[str, NDArray[Any]]


class Shelf:
    """The answers of one epoch, memory-mapped: what lies where, and any of it at once. In memory are 8 bytes a sample."""

    def __init__(self, parts: list[Columns], num_samples: int) -> None:
        self._parts = parts
        self._places_N = np.full(num_samples, -1, dtype=np.int64)
        for number, part in enumerate(parts):
            self._places_N[part["sample"]] = (number << _ROW_BITS) + np.arange(len(part["sample"]))

    @property
    def missing_N(self) -> NDArray[np.bool_]:
        """Whose answer is not there."""
        found: NDArray[np.bool_] = self._places_N < 0
        return found

    def missing(self, samples_B: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of these are not there (B,)."""
        found: NDArray[np.bool_] = self._places_N[samples_B] < 0
        return found

    def gather(self, samples_B: NDArray[np.int64], out: Mapping[str, NDArray[Any]]) -> None:
        """The columns of samples that are there, into `out`; a few calls for each part that holds some, none for each sample."""
        places_B = self._places_N[samples_B]
        numbers_B, rows_B = places_B >> _ROW_BITS, places_B & ((1 << _ROW_BITS) - 1)
        for number in np.unique(numbers_B).tolist():
            mine = np.flatnonzero(numbers_B == number)
            for name, values in out.items():
                values[mine] = self._parts[number][name][rows_B[mine]]


class Store:
    """The parts of one key."""

    def __init__(self, folder: Path, layout: Layout, num_samples: int) -> None:
        self.folder, self.layout, self.num_samples = folder, layout, num_samples
        self._whole: set[Path] = set()  # files whose checksum was compared
        columns = {"sample": ("int32", 0), **layout.columns}
        self._schema = pa.schema([
            pa.field(name, pa.list_(_ARROW[kind], count) if count else _ARROW[kind]) for name, (kind, count) in columns.items()
        ])  # fmt: skip

    def write(self, epoch: int, columns: Columns) -> None:
        """Keep the answers of an epoch: `sample` and the layout's columns. Raises OSError, as where the disk is full."""
        arrays = [_array(field, columns[field.name]) for field in self._schema]
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, self._schema) as file:
            file.write_batch(pa.record_batch(arrays, schema=self._schema))
        content = sink.getvalue()
        digest = hashlib.sha256(content).hexdigest()
        with replacing(self._of(epoch) / f"{len(columns['sample'])}-{digest}.arrow") as beside:
            beside.write_bytes(content)

    def open(self, epoch: int) -> Shelf:
        """What is there of an epoch now. A damaged part is named in the log and left out."""
        parts = [self._read(path) for path in sorted(_files(self._of(epoch)))]
        return Shelf([part for part in parts if part is not None], self.num_samples)

    def tidy(self) -> None:
        """Remove what kills have left of parts that were being written, an hour ago or more."""
        for leftover in self.folder.glob(f"{_EPOCH}*/.*.tmp"):
            with contextlib.suppress(FileNotFoundError):
                if leftover.stat().st_mtime < time.time() - _LEFTOVER_S:
                    leftover.unlink()

    def size(self, num_epochs: int) -> tuple[int, int]:
        """Rows and bytes of the first `num_epochs` epochs, by the files' names; no epoch has more rows than there are samples.

        Of an epoch that several jobs filled at once, each with parts of its own, it may be fewer rows than it says.
        """
        folders = self.folder.glob(f"{_EPOCH}*")
        epochs = [_files(folder) for folder in folders if int(folder.name[len(_EPOCH) :]) < num_epochs]
        rows = [sum(int(path.name.partition("-")[0]) for path in files) for files in epochs]
        return sum(min(count, self.num_samples) for count in rows), sum(path.stat().st_size for files in epochs for path in files)

    def _of(self, epoch: int) -> Path:
        return self.folder / f"{_EPOCH}{epoch:05}"

    def _read(self, path: Path) -> Columns | None:
        """A part, mapped; None where it is damaged."""
        try:
            with pa.memory_map(str(path)) as file:
                content = file.read_buffer()
            if path not in self._whole:
                if hashlib.sha256(content).hexdigest() != path.stem.partition("-")[2]:
                    raise pa.ArrowInvalid("it has another checksum than its name says")
                self._whole.add(path)
            batch = pa.ipc.open_file(pa.BufferReader(content)).get_batch(0)
            if batch.schema != self._schema:
                raise pa.ArrowInvalid("it has other columns")
            part = {field.name: _numbers(field, batch.column(field.name)) for field in self._schema}
            if len(batch) and not 0 <= part["sample"].min() <= part["sample"].max() < self.num_samples:
                raise pa.ArrowInvalid("it tells of samples that there are not")
            return part
        except (pa.ArrowException, OSError, ValueError) as error:
            log.warning("teacher.cache: %s is left out: %s", path, str(error).splitlines()[0])
            return None


def _files(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            return [Path(entry.path) for entry in entries if _NAME.fullmatch(entry.name)]
    except FileNotFoundError:
        return []


def _array(field: Any, values: NDArray[Any]) -> Any:
    """Numbers (R,) or (R, k) as the column of a part."""
    flat = np.ascontiguousarray(values)
    if not pa.types.is_fixed_size_list(field.type):
        return pa.Array.from_buffers(field.type, len(values), [None, pa.py_buffer(flat)])
    inner = pa.Array.from_buffers(field.type.value_type, flat.size, [None, pa.py_buffer(flat)])
    return pa.FixedSizeListArray.from_arrays(inner, type=field.type)


def _numbers(field: Any, column: Any) -> NDArray[Any]:
    """A column of a part (R,) or (R, k), where it lies."""
    width = field.type.list_size if pa.types.is_fixed_size_list(field.type) else 0
    if column.null_count or column.offset:
        raise pa.ArrowInvalid("it has gaps")
    inner = column.values if width else column
    kind = next(name for name, arrow in _ARROW.items() if arrow == inner.type)
    numbers = np.frombuffer(inner.buffers()[1], dtype=kind, count=len(column) * max(width, 1))
    return numbers.reshape(len(column), width) if width else numbers
