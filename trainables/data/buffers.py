"""The memory that an epoch's batches are read into: a few buffers, used in turn.

Shapes: B samples of one batch, at most `rows`; C=3 channels, H=W pixels.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch

GIVEN_OUT = 2
"""Batches that hold after they were given out: the one that was asked for last and the one before, see `loader.Batch`."""


class Buffer:
    """Room for one batch of up to `rows` samples; pinned where a GPU fetches it."""

    def __init__(self, rows: int, image_size: int, pinned: bool) -> None:
        self.images_BHWC = torch.empty((rows, image_size, image_size, 3), dtype=torch.uint8, pin_memory=pinned)
        self.labels_B = torch.empty(rows, dtype=torch.int64, pin_memory=pinned)
        self.indices_B = torch.empty(rows, dtype=torch.int64, pin_memory=pinned)


def ring(num_buffers: int, rows: int, image_size: int, pinned: bool) -> Iterator[Buffer]:
    """A buffer for each batch of an epoch, each made when it is first needed; after `num_buffers` the first one comes again."""
    return itertools.cycle(Buffer(rows, image_size, pinned) for _ in range(num_buffers))


def buffer_bytes(rows: int, image_size: int) -> int:
    """Bytes of one buffer: uint8 pixels, and an int64 label and index a sample."""
    return rows * (3 * image_size**2 + 16)
