"""Rows on disk: FOLDER/EPOCH/ROWS-SHA256.npy, blocks that one worker each writes, named by their content.

A block is a numpy file of rows (`trainables.teachers.rows`) in one epoch's augmentation, written whole under a temporary name and
renamed. It counts where its checksum is the one in its name. So any number of jobs fill a folder at once: equal blocks are one
file, and overlaps are equal.

Shapes: N samples of the training split, B samples that are read, R rows of a block.
"""

import contextlib
import hashlib
import io
import logging
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainables.rundir import write_atomic
from trainables.teachers.rows import Rows

log = logging.getLogger("raydistill")

_STALE_S = 3600.0
_BLOCK_NAME = re.compile(r"(\d+)-([0-9a-f]{64})\.npy")


class EpochRows:
    """The rows of one epoch: its blocks, memory-mapped, and an index of 8 bytes a sample."""

    def __init__(self, blocks: list[Rows], row: np.dtype[Any], num_samples: int) -> None:
        self._blocks, self._row = blocks, row
        self._block_N, self._row_N = np.full(num_samples, -1, dtype=np.int32), np.zeros(num_samples, dtype=np.int32)
        """Where each sample is; block -1: it is missing."""
        for number, block in enumerate(blocks):
            self._block_N[block["sample"]] = number
            self._row_N[block["sample"]] = np.arange(len(block))

    @property
    def missing_N(self) -> NDArray[np.bool_]:
        return np.asarray(self._block_N < 0)

    def missing(self, indices_B: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether each of these samples is missing (B,)."""
        return np.asarray(self._block_N[indices_B] < 0)

    def read(self, indices_B: NDArray[np.int64]) -> Rows:
        """The rows (B,) of samples that are there."""
        rows_B, blocks_B = np.empty(len(indices_B), self._row), self._block_N[indices_B]
        for number in np.unique(blocks_B).tolist():
            selected = np.flatnonzero(blocks_B == number)
            rows_B[selected] = self._blocks[number][self._row_N[indices_B[selected]]]
        return rows_B


class RowStore:
    """The blocks of one key."""

    def __init__(self, folder: Path, row: np.dtype[Any], num_samples: int) -> None:
        self.folder, self.row, self.num_samples = folder, row, num_samples
        self._verified: set[Path] = set()

    def write(self, epoch: int, rows: Rows) -> None:
        """Add a block to an epoch. Raises OSError, as where the disk is full."""
        file = io.BytesIO()
        np.save(file, rows)
        digest = hashlib.sha256(file.getbuffer()).hexdigest()
        write_atomic(self._epoch_folder(epoch) / f"{len(rows)}-{digest}.npy", file.getvalue())

    def open(self, epoch: int) -> EpochRows:
        """The rows of an epoch that are there now. A damaged block is named in the log and left out."""
        blocks = [self._map(path) for path in sorted(_blocks(self._epoch_folder(epoch)))]
        return EpochRows([block for block in blocks if block is not None], self.row, self.num_samples)

    def remove_stale_temporaries(self) -> None:
        """Remove temporary files that killed jobs left an hour ago or more."""
        for temporary in self.folder.glob("epoch-*/.*.tmp"):
            with contextlib.suppress(FileNotFoundError):
                if temporary.stat().st_mtime < time.time() - _STALE_S:
                    temporary.unlink()

    def size(self, num_epochs: int) -> tuple[int, int]:
        """Rows and bytes of the first `num_epochs` epochs, by the files' names; an epoch counts as at most one row a sample.

        Of an epoch that several jobs filled at once, each with blocks of its own, there may be fewer rows than that.
        """
        num_rows = num_bytes = 0
        for folder in self.folder.glob("epoch-*"):
            number = folder.name.removeprefix("epoch-")
            if number.isdecimal() and int(number) < num_epochs:
                blocks = _blocks(folder)
                num_rows += min(self.num_samples, sum(int(path.name.partition("-")[0]) for path in blocks))
                num_bytes += sum(path.stat().st_size for path in blocks)
        return num_rows, num_bytes

    def _epoch_folder(self, epoch: int) -> Path:
        return self.folder / f"epoch-{epoch:05}"

    def _map(self, path: Path) -> Rows | None:
        """A block, memory-mapped; None where it is damaged."""
        try:
            if path not in self._verified:
                with path.open("rb") as file:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
                if digest not in path.name:
                    raise ValueError("its checksum is not the one in its name")
            block: Rows = np.load(path, mmap_mode="r")
            if block.dtype != self.row:
                raise ValueError("it has other columns")
            if not 0 <= block["sample"].min() <= block["sample"].max() < self.num_samples:
                raise ValueError("it has samples that do not exist")
        except (ValueError, OSError) as error:
            log.warning("teacher.cache: %s is left out: %s", path, error)
            return None
        self._verified.add(path)
        return block


def _blocks(folder: Path) -> list[Path]:
    try:
        return [path for path in folder.iterdir() if _BLOCK_NAME.fullmatch(path.name)]
    except FileNotFoundError:
        return []
