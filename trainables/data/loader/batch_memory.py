"""The memory that a loader's batches are read into. A block of it is used again as soon as nothing refers to it.

Shapes: B samples of one batch, at most those of the layout; C=3 channels, H=W pixels.
"""

import logging
import mmap
import os
import sys
import weakref
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainables.data.loader.batch_layout import BatchLayout

log = logging.getLogger("raydistill")


class Block(NamedTuple):
    """Memory for the samples of one batch; the values are undefined."""

    images_BCHW: Tensor  # uint8, channels last in memory
    labels_B: Tensor  # int64
    indices_B: Tensor  # int64
    number: int  # of the block


class BatchMemory:
    """Allocates blocks of memory, each for one batch; pinned where a GPU copies from them.

    A block is free when the last tensor or array that shares its memory is gone, whoever had it. Pinned blocks come from torch's
    own caching allocator, which also waits for copies to a GPU that are under way; see `free_pinned`. Other blocks are cached
    here: fresh memory costs a page fault every 4 KiB. Those are arrays, to which every tensor on them refers: an operation of
    torch costs the training thread more than all else of a batch.
    """

    def __init__(self, layout: BatchLayout, *, pinned: bool) -> None:
        self.layout, self._pinned = layout, pinned
        self.block_bytes = 1 << (layout.num_bytes - 1).bit_length() if pinned else layout.num_bytes
        """What a block takes: torch's allocator rounds pinned memory up to a power of two."""
        self._blocks: list[NDArray[np.uint8]] = []
        self._arrays: list[tuple[NDArray[Any], ...]] = []  # of each block, see `BatchLayout`
        self._references_if_free = 0

    def allocate(self, rows: int) -> Block:
        """A block for a batch of so many samples, at most `layout.rows`."""
        if self._pinned:
            return self._allocate_pinned(rows)
        number = next((number for number in range(len(self._blocks)) if self._is_free(number)), len(self._blocks))
        if number == len(self._blocks):
            self._blocks.append(self._new_block(number))
            self._arrays.append(self.layout.arrays(self._blocks[number]))
            self._references_if_free = self._num_references(number)
        images_BCHW, labels_B, indices_B = self._arrays[number]
        # each slice, and so each tensor, refers to the block itself
        return Block(
            torch.from_numpy(images_BCHW[:rows]), torch.from_numpy(labels_B[:rows]), torch.from_numpy(indices_B[:rows]), number
        )

    def _is_free(self, number: int) -> bool:
        return self._num_references(number) == self._references_if_free

    def _num_references(self, number: int) -> int:
        return sys.getrefcount(self._blocks[number])

    def _allocate_pinned(self, rows: int) -> Block:
        layout, memory = self.layout, torch.empty(self.layout.num_bytes, dtype=torch.uint8, pin_memory=True)
        _, height, width, channels = layout.images_shape
        strides = height * width * channels, 1, width * channels, channels
        images_BCHW = memory.as_strided((rows, channels, height, width), strides)
        numbers = memory[layout.labels_at :].view(torch.int64)
        return Block(images_BCHW, numbers[:rows], numbers[layout.rows : layout.rows + rows], 0)

    def _new_block(self, number: int) -> NDArray[np.uint8]:
        return torch.empty(self.layout.num_bytes, dtype=torch.uint8).numpy()


class SharedBatchMemory(BatchMemory):
    """Blocks in memory without a name, which another process maps too, by `handle`: block n begins at n · `block_bytes`.

    It is gone with the last process that has it, however that ends. Where a GPU copies from the blocks they are page-locked in
    this process; whoever copies refers to a block until its copy is over.
    """

    def __init__(self, layout: BatchLayout, *, pinned: bool) -> None:
        super().__init__(layout, pinned=False)
        self.block_bytes = -(-layout.num_bytes // mmap.ALLOCATIONGRANULARITY) * mmap.ALLOCATIONGRANULARITY
        self.handle = os.memfd_create("loader batches")
        self._page_locked = pinned

    def close(self) -> None:
        """Free what nothing refers to; the rest is free when that is so. Nothing is allocated any more."""
        os.close(self.handle)
        self._blocks.clear()
        self._arrays.clear()

    def _new_block(self, number: int) -> NDArray[np.uint8]:
        os.ftruncate(self.handle, (number + 1) * self.block_bytes)
        mapped = mmap.mmap(self.handle, self.block_bytes, offset=number * self.block_bytes)
        block = np.frombuffer(mapped, dtype=np.uint8)
        if self._page_locked:
            self._page_lock(block)
        return block

    def _page_lock(self, block: NDArray[np.uint8]) -> None:
        cuda = torch.cuda.cudart()
        try:
            torch.cuda.check_error(cuda.cudaHostRegister(block.ctypes.data, self.block_bytes, 0))
        except torch.cuda.CudaError as error:  # copies from it are as right, and slower
            log.warning("the loader's batches are not page-locked: %s", error)
            self._page_locked = False
        else:
            weakref.finalize(block, cuda.cudaHostUnregister, block.ctypes.data)  # runs before the block is unmapped


def free_pinned() -> None:
    """Give back the pinned memory that nothing refers to, such as that of closed loaders: torch's allocator never does so."""
    torch._C._host_emptyCache()  # its public name, in torch.accelerator.memory, is newer than the oldest torch that we support
