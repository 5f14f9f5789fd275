"""The memory that a loader's batches are read into. A block of it is used again as soon as nothing refers to it.

Shapes: B samples of one batch, at most `rows`; C=3 channels, H=W=`image_size` pixels.
"""

import math
import weakref

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class BatchMemory:
    """Allocates blocks of memory, each for a batch of up to `rows` samples; pinned where a GPU copies from them.

    A block is free when the last tensor or array that shares its memory is gone, whoever had it. Pinned blocks come from torch's
    own caching allocator, which also waits for copies to a GPU that are under way; see `free_pinned`. Other blocks are cached
    here: fresh memory costs a page fault every 4 KiB.
    """

    def __init__(self, rows: int, image_size: int, *, pinned: bool) -> None:
        self._images_shape, self._pinned = (rows, image_size, image_size, 3), pinned
        self._image_bytes = -(-3 * rows * image_size**2 // 8) * 8  # int64 follow
        self._used_bytes = self._image_bytes + 16 * rows  # uint8 pixels, and an int64 label and index a sample
        self.block_bytes = 1 << (self._used_bytes - 1).bit_length() if pinned else self._used_bytes
        """What a block takes: torch's allocator rounds pinned memory up to a power of two."""
        self._free: list[NDArray[np.uint8]] = []

    def allocate(self) -> tuple[Tensor, Tensor, Tensor]:
        """images_BHWC (uint8), labels_B and indices_B (int64) of a new batch, in one block; the values are undefined."""
        block = self._allocate_block()
        labels_B, indices_B = block[self._image_bytes :].view(torch.int64).chunk(2)
        return block[: math.prod(self._images_shape)].view(self._images_shape), labels_B, indices_B

    def _allocate_block(self) -> Tensor:
        if self._pinned:
            return torch.empty(self._used_bytes, dtype=torch.uint8, pin_memory=True)
        memory = self._free.pop() if self._free else torch.empty(self._used_bytes, dtype=torch.uint8).numpy()
        lease = memory[:]  # every tensor on the block keeps this very array alive
        weakref.finalize(lease, self._free.append, memory)
        return torch.from_numpy(lease)


def free_pinned() -> None:
    """Give back the pinned memory that nothing refers to, such as that of closed loaders: torch's allocator never does so."""
    torch._C._host_emptyCache()  # its public name, in torch.accelerator.memory, is newer than the oldest torch that we support
