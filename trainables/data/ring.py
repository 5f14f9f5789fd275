"""The memory that an epoch's batches are read into: a few buffers, used again and again.

Shapes: B samples of one batch, at most `rows`; C=3 channels, H=W pixels.
"""

from __future__ import annotations

from collections import deque

import torch

_COPIES_UNDER_WAY = 2  # batches that a GPU may still be fetching while later ones are read


class Buffer:
    """Room for one batch of up to `rows` samples; pinned where a GPU fetches it."""

    def __init__(self, rows: int, image_size: int, pinned: bool) -> None:
        self.images_BHWC = torch.empty((rows, image_size, image_size, 3), dtype=torch.uint8, pin_memory=pinned)
        self.labels_B = torch.empty(rows, dtype=torch.int64, pin_memory=pinned)
        self.indices_B = torch.empty(rows, dtype=torch.int64, pin_memory=pinned)
        self.copied: torch.cuda.Event | None = None
        """The GPU has read it once this event has passed; None: nobody reads it."""


class Ring:
    """At most `num_buffers` buffers, handed out in the order in which they came back.

    A GPU's copy may still run when its batch is given back, so it is only handed out again when what `device` had been given
    to do by then, on the caller's current stream, is done.
    """

    def __init__(self, num_buffers: int, rows: int, image_size: int, device: torch.device) -> None:
        self._room, self._rows, self._image_size, self._device = num_buffers, rows, image_size, device
        self._free: deque[Buffer] = deque()

    def take(self) -> Buffer:
        """A buffer to fill; waits for the GPU where all are on their way to it. IndexError where all are taken."""
        if self._room:
            self._room -= 1
            return Buffer(self._rows, self._image_size, self._device.type == "cuda")
        buffer = self._free.popleft()
        if buffer.copied is not None:
            buffer.copied.synchronize()
        return buffer

    def give_back(self, buffer: Buffer) -> None:
        """The caller reads `buffer` no more, except by copies that it has put on its current stream."""
        if self._device.type == "cuda":
            if buffer.copied is None:
                buffer.copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            buffer.copied.record(torch.cuda.current_stream(self._device))
        self._free.append(buffer)


def num_buffers(batches_ahead: int, device: torch.device) -> int:
    """One batch that is trained on, those that are read ahead, and those on their way to a GPU."""
    return 1 + batches_ahead + (_COPIES_UNDER_WAY if device.type == "cuda" else 0)


def buffer_bytes(rows: int, image_size: int) -> int:
    """Bytes of one buffer: uint8 pixels, and an int64 label and index a sample."""
    return rows * (3 * image_size**2 + 16)
