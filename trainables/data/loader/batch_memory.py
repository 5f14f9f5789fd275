"""The memory of the loader's batches, in blocks: each stores the pixels, labels and views of one batch, in this order.

Loader processes import this, so it must not import torch. Shapes: B samples of a batch, C=3 channels, H=W=`image_size` pixels.
"""

import contextlib
import logging
import math
import mmap
import os
import weakref
from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

log = logging.getLogger("raydistill")

Arrays = tuple[NDArray[Any], NDArray[Any], NDArray[Any]]
"""images_BHWC (uint8), labels_B and views_B (int64) in the first rows of a block."""


class BatchMemory:
    """Numbered blocks, private to this process or, with the `handle` of a memory file, shared by all that map this file.

    Only one process allocates. A block is in use until `free`, or until the arrays from `lend` and everything that shares their
    memory are gone. Blocks stay mapped until `close`, since fresh memory costs a page fault per 4 KiB. `pinned` blocks are
    page-locked for copies to a GPU: keep a reference to the arrays until the copy is done.
    """

    def __init__(self, rows: int, image_size: int, handle: int = -1, *, pinned: bool = False) -> None:
        self.handle, self._rows, self._image_shape, self._pinned = handle, rows, (image_size, image_size, 3), pinned
        self._labels_at = -(-rows * math.prod(self._image_shape) // 8) * 8  # int64 is aligned
        num_bytes = self._labels_at + 16 * rows
        self.block_bytes = -(-num_bytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        self._blocks: dict[int, NDArray[np.uint8]] = {}
        self._free, self._lent = deque[int](), dict[int, weakref.ref[NDArray[np.uint8]]]()

    def allocate(self) -> int:
        """Return the number of a block with undefined contents."""
        number = self._free.pop() if self._free else len(self._blocks)
        self._block(number)
        return number

    def free(self, number: int) -> None:
        """Give back a block that is no longer read or written."""
        self._free.append(number)

    def arrays(self, number: int, rows: int) -> Arrays:
        """Return the arrays of a block's first rows, to fill them; they do not keep the block alive."""
        return self._split(self._block(number), rows)

    def lend(self, number: int, rows: int) -> Arrays:
        """Return the arrays of a block's first rows, to use the batch; the block is freed when nothing shares their memory."""
        lent = np.frombuffer(self._block(number).data, np.uint8)  # NumPy makes it the base of all arrays and tensors on it
        self._lent[number] = weakref.ref(lent, lambda _: self.free(number))
        return self._split(lent, rows)

    def close(self) -> None:
        """Unmap the blocks, lent ones once they are freed. Do not allocate afterward."""
        self._blocks.clear()
        if self.handle >= 0:
            os.close(self.handle)
            self.handle = -1

    def _block(self, number: int) -> NDArray[np.uint8]:
        if number not in self._blocks:
            if self.handle < 0:
                mapped = mmap.mmap(-1, self.block_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            else:
                os.posix_fallocate(self.handle, number * self.block_bytes, self.block_bytes)
                mapped = mmap.mmap(self.handle, self.block_bytes, offset=number * self.block_bytes)
            self._blocks[number] = np.frombuffer(mapped, dtype=np.uint8)
            if self._pinned:
                self._page_lock(self._blocks[number])
        return self._blocks[number]

    def _page_lock(self, block: NDArray[np.uint8]) -> None:
        import torch

        cuda = torch.cuda.cudart()
        try:
            torch.cuda.check_error(cuda.cudaHostRegister(block.ctypes.data, self.block_bytes, 0))
        except torch.cuda.CudaError as error:  # copies still work, but slower
            log.warning("the loader's batches are not page-locked: %s", error)
            self._pinned = False
            with contextlib.suppress(Exception):  # the CUDA runtime reports the error again at the next kernel
                torch.ones(1, device="cuda").add_(1)
        else:
            weakref.finalize(block, cuda.cudaHostUnregister, block.ctypes.data)  # runs before the block is unmapped

    def _split(self, block: NDArray[np.uint8], rows: int) -> Arrays:
        if rows > self._rows:
            raise ValueError(f"{rows} rows in a block of {self._rows}: their pixels would overlap the labels")
        images_BHWC = np.ndarray((rows, *self._image_shape), np.uint8, block)
        labels_B = np.ndarray(rows, np.int64, block, self._labels_at)
        return images_BHWC, labels_B, np.ndarray(rows, np.int64, block, self._labels_at + 8 * self._rows)
