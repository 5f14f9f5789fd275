"""Rows about images on disk: FOLDER/EPOCH/ROWS-SHA256.npy, blocks that one worker each writes, named by their content.

A row is what the store's owner declares: named numbers of a type and shape, for one image in one epoch's augmentation. A block
is a numpy file of such rows and their images' indices, written whole under a temporary name and renamed. It counts where its
checksum is the one in its name. So any number of jobs fill a folder at once: equal blocks are one file, and overlaps are equal.

Shapes: N samples of the training split, B samples that are read, R rows of a block.
"""

import contextlib
import hashlib
import io
import logging
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainables.rundir import write_atomic

log = logging.getLogger("raydistill")

Columns = Mapping[str, tuple[str, tuple[int, ...]]]
"""What is stored of an image: name → dtype and shape."""
Rows = dict[str, NDArray[Any]]
"""Columns of several images: name → (R, ...)."""
_ROW_BITS = 32
_STALE_S = 3600.0
_EPOCH_NAME = re.compile(r"epoch-(\d+)")
_BLOCK_NAME = re.compile(r"(\d+)-([0-9a-f]{64})\.npy")


class EpochRows:
    """The rows of one epoch: its blocks, memory-mapped, and an index of 8 bytes a sample."""

    def __init__(self, blocks: list[NDArray[Any]], num_samples: int) -> None:
        self._blocks = blocks
        self._positions_N = np.full(num_samples, -1, dtype=np.int64)
        """Block and row of each sample; -1 where it is missing."""
        for number, block in enumerate(blocks):
            self._positions_N[block["sample"]] = (number << _ROW_BITS) + np.arange(len(block))

    @property
    def missing_N(self) -> NDArray[np.bool_]:
        return np.asarray(self._positions_N < 0)

    def missing(self, indices_B: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Whether each of these samples is missing (B,)."""
        return np.asarray(self._positions_N[indices_B] < 0)

    def gather(self, indices_B: NDArray[np.int64], out: Rows) -> None:
        """Copy columns of samples that are there to `out`."""
        positions_B = self._positions_N[indices_B]
        blocks_B, rows_B = positions_B >> _ROW_BITS, positions_B & ((1 << _ROW_BITS) - 1)
        for number in np.unique(blocks_B).tolist():
            selected = np.flatnonzero(blocks_B == number)
            rows = self._blocks[number][rows_B[selected]]
            for name, values in out.items():
                values[selected] = rows[name]


class RowStore:
    """The blocks of one key."""

    def __init__(self, folder: Path, columns: Columns, num_samples: int) -> None:
        self.folder, self.num_samples = folder, num_samples
        self.row = np.dtype([("sample", "int32", ()), *((name, *kind) for name, kind in columns.items())])
        self._verified: set[Path] = set()

    def write(self, epoch: int, rows: Rows) -> None:
        """Add a block to an epoch: `sample` and the store's columns. Raises OSError, as where the disk is full."""
        block = np.empty(len(rows["sample"]), self.row)
        for name in self.row.names or ():
            block[name] = rows[name]
        file = io.BytesIO()
        np.save(file, block)
        digest = hashlib.sha256(file.getbuffer()).hexdigest()
        write_atomic(self._epoch_folder(epoch) / f"{len(block)}-{digest}.npy", file.getvalue())

    def open(self, epoch: int) -> EpochRows:
        """The rows of an epoch that are there now. A damaged block is named in the log and left out."""
        blocks = [self._map(path) for path in sorted(_blocks(self._epoch_folder(epoch)))]
        return EpochRows([block for block in blocks if block is not None], self.num_samples)

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
        names = [_EPOCH_NAME.fullmatch(folder.name) for folder in self.folder.glob("epoch-*")]
        epochs = [_blocks(self.folder / name[0]) for name in names if name and int(name[1]) < num_epochs]
        num_rows = (sum(int(path.name.partition("-")[0]) for path in paths) for paths in epochs)
        num_bytes = sum(path.stat().st_size for paths in epochs for path in paths)
        return sum(min(count, self.num_samples) for count in num_rows), num_bytes

    def _epoch_folder(self, epoch: int) -> Path:
        return self.folder / f"epoch-{epoch:05}"

    def _map(self, path: Path) -> NDArray[Any] | None:
        """A block, memory-mapped; None where it is damaged."""
        try:
            if path not in self._verified:
                with path.open("rb") as file:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
                if digest not in path.name:
                    raise ValueError("its checksum is not the one in its name")
            block: NDArray[Any] = np.load(path, mmap_mode="r")
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
