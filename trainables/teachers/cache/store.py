"""Logits on disk: DIR/KEY/EPOCH/ROWS-SHA256.arrow, each segment written by one worker under a name made of its content.

So any number of jobs fill one folder at once: equal segments of two jobs are one file, and rows that overlap are equal. A segment
whose checksum is not its name counts as missing.

Shapes: N samples of the training split, B samples that are read, R rows of a segment.
"""

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

from trainables.data.sources.arrow import to_arrow, to_numpy
from trainables.rundir import replacing
from trainables.teachers.cache.logits_format import LogitsFormat

log = logging.getLogger("raydistill")

_ROW_BITS = 32
_EPOCH = "epoch-"
_EPOCH_NAME = re.compile(rf"{_EPOCH}(\d+)")
_STALE_S = 3600.0
_SEGMENT_NAME = re.compile(r"[0-9]+-[0-9a-f]{64}\.arrow")
Columns = dict[str, NDArray[Any]]


class EpochLogits:
    """The cached logits of one epoch: its segments, memory-mapped, and an index of 8 bytes a sample."""

    def __init__(self, segments: list[Columns], num_samples: int) -> None:
        self._segments = segments
        self._positions_N = np.full(num_samples, -1, dtype=np.int64)
        """Segment and row of each sample; -1 where it is missing."""
        for number, segment in enumerate(segments):
            self._positions_N[segment["sample"]] = (number << _ROW_BITS) + np.arange(len(segment["sample"]))

    @property
    def missing_N(self) -> NDArray[np.bool_]:
        return np.asarray(self._positions_N < 0)

    def missing(self, indices_B: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether each of these samples is missing (B,)."""
        return np.asarray(self._positions_N[indices_B] < 0)

    def gather(self, indices_B: NDArray[np.int64], out: Mapping[str, NDArray[Any]]) -> None:
        """Copy the columns of samples that are there to `out`; a few calls for each segment, none for each sample."""
        positions_B = self._positions_N[indices_B]
        segments_B, rows_B = positions_B >> _ROW_BITS, positions_B & ((1 << _ROW_BITS) - 1)
        for number in np.unique(segments_B).tolist():
            selected = np.flatnonzero(segments_B == number)
            for name, values in out.items():
                values[selected] = self._segments[number][name][rows_B[selected]]


class LogitsStore:
    """The segments of one key."""

    def __init__(self, folder: Path, logits_format: LogitsFormat, num_samples: int) -> None:
        self.folder, self.format, self.num_samples = folder, logits_format, num_samples
        self._verified: set[Path] = set()
        self._columns = {"sample": ("int32", 0), **logits_format.columns}
        self._schema = pa.schema([pa.field(name, _arrow_type(*kind)) for name, kind in self._columns.items()])

    def write(self, epoch: int, columns: Columns) -> None:
        """Add a segment to an epoch: `sample` and the format's columns. Raises OSError, as where the disk is full."""
        arrays = [_to_arrow(field, columns[field.name]) for field in self._schema]
        sink = pa.BufferOutputStream()
        with pa.ipc.new_file(sink, self._schema) as file:
            file.write_batch(pa.record_batch(arrays, schema=self._schema))
        content = sink.getvalue()
        digest = hashlib.sha256(content).hexdigest()
        with replacing(self._epoch_folder(epoch) / f"{len(columns['sample'])}-{digest}.arrow") as temporary:
            temporary.write_bytes(content)

    def open(self, epoch: int) -> EpochLogits:
        """The segments of an epoch that are there now. A damaged one is named in the log and left out."""
        segments = [self._read(path) for path in sorted(_segments(self._epoch_folder(epoch)))]
        return EpochLogits([segment for segment in segments if segment is not None], self.num_samples)

    def remove_stale_temporaries(self) -> None:
        """Remove temporary files that killed jobs left an hour ago or more."""
        for temporary in self.folder.glob(f"{_EPOCH}*/.*.tmp"):
            with contextlib.suppress(FileNotFoundError):
                if temporary.stat().st_mtime < time.time() - _STALE_S:
                    temporary.unlink()

    def size(self, num_epochs: int) -> tuple[int, int]:
        """Rows and bytes of the first `num_epochs` epochs, by the files' names; an epoch counts as at most one row a sample.

        Of an epoch that several jobs filled at once, each with segments of its own, there may be fewer rows than that.
        """
        names = [_EPOCH_NAME.fullmatch(folder.name) for folder in self.folder.glob(f"{_EPOCH}*")]
        epochs = [_segments(self.folder / name[0]) for name in names if name and int(name[1]) < num_epochs]
        rows = [sum(int(path.name.partition("-")[0]) for path in paths) for paths in epochs]
        num_bytes = sum(path.stat().st_size for paths in epochs for path in paths)
        return sum(min(count, self.num_samples) for count in rows), num_bytes

    def _epoch_folder(self, epoch: int) -> Path:
        return self.folder / f"{_EPOCH}{epoch:05}"

    def _read(self, path: Path) -> Columns | None:
        """A segment, memory-mapped; None where it is damaged."""
        try:
            with pa.memory_map(str(path)) as file:
                content = file.read_buffer()
            if path not in self._verified:
                if hashlib.sha256(content).hexdigest() != path.stem.partition("-")[2]:
                    raise pa.ArrowInvalid("its checksum is not the one in its name")
                self._verified.add(path)
            batch = pa.ipc.open_file(pa.BufferReader(content)).get_batch(0)
            if batch.schema != self._schema:
                raise pa.ArrowInvalid("it has other columns")
            segment = {name: _to_numpy(batch.column(name), *kind) for name, kind in self._columns.items()}
            if len(batch) and not 0 <= segment["sample"].min() <= segment["sample"].max() < self.num_samples:
                raise pa.ArrowInvalid("it has samples that do not exist")
            return segment
        except (pa.ArrowException, OSError, ValueError) as error:
            log.warning("teacher.cache: %s is left out: %s", path, str(error).splitlines()[0])
            return None


def _segments(folder: Path) -> list[Path]:
    try:
        with os.scandir(folder) as entries:
            return [Path(entry.path) for entry in entries if _SEGMENT_NAME.fullmatch(entry.name)]
    except FileNotFoundError:
        return []


def _arrow_type(dtype: str, width: int) -> Any:
    number = pa.from_numpy_dtype(dtype)
    return pa.list_(number, width) if width else number


def _to_arrow(field: Any, values: NDArray[Any]) -> Any:
    """Numbers (R,) or (R, k) as a segment's column."""
    numbers = to_arrow(values.reshape(-1))
    return pa.FixedSizeListArray.from_arrays(numbers, type=field.type) if values.ndim > 1 else numbers


def _to_numpy(column: Any, dtype: str, width: int) -> NDArray[Any]:
    """A segment's column (R,) or, of `width` numbers a row, (R, k), not copied."""
    if not width:
        return to_numpy(column, dtype)
    if column.null_count:
        raise pa.ArrowInvalid("gaps")
    return to_numpy(column.flatten(), dtype).reshape(len(column), width)
