"""The memory that a loader's batches are read into. A block of it is used again as soon as nothing refers to it.

Shapes: B samples of one batch, at most `rows`; C=3 channels, H=W=`image_size` pixels.
"""

from __future__ import annotations

import weakref

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class BatchMemory:
    """Allocates blocks of memory, each for a batch of up to `rows` samples; pinned where a GPU copies from them.

    A block is free when the last tensor or array that shares its memory is gone, whoever had it. Pinned blocks come from torch's
    own caching allocator, which also waits for copies to a GPU that are under way. Other blocks are cached here: fresh memory
    costs a page fault every 4 KiB.
    """

    def __init__(self, rows: int, image_size: int, *, pinned: bool) -> None:
        self._rows, self._image_size, self._pinned = rows, image_size, pinned
        self._free: list[NDArray[np.uint8]] = []

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: uint8 pixels, and an int64 label and index a sample."""
        return self._rows * (3 * self._image_size**2 + 16)

    def allocate(self) -> tuple[Tensor, Tensor, Tensor]:
        """images_BHWC (uint8), labels_B and indices_B (int64) of a new batch, in one block; the values are undefined."""
        block = self._allocate_block()
        labels_B, indices_B = block[: 16 * self._rows].view(torch.int64).split(self._rows)
        return block[16 * self._rows :].view(self._rows, self._image_size, self._image_size, 3), labels_B, indices_B

    def _allocate_block(self) -> Tensor:
        if self._pinned:
            return torch.empty(self.block_bytes, dtype=torch.uint8, pin_memory=True)
        memory = self._free.pop() if self._free else np.empty(self.block_bytes, dtype=np.uint8)
        lease = memory[:]  # every tensor on the block keeps this very array alive
        weakref.finalize(lease, self._free.append, memory)
        return torch.from_numpy(lease)
