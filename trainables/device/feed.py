"""A loader's batches on the device, the next one copied while the current one is trained on.

Shapes: B samples of this rank's part of a global batch, C=3 channels, H=W=data.image_size pixels.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from typing import NamedTuple

import torch
from torch import Tensor

from trainables.data.loader import Batch


class DeviceBatch(NamedTuple):
    """One rank's part of a global batch, on the device as soon as `wait` was called."""

    images_BCHW: Tensor  # uint8, channels last in memory
    labels_B: Tensor  # int64
    indices_B: Tensor  # int64, dataset-wide
    epoch: int
    position: int  # global samples of the epoch that are consumed once this batch is trained on
    copied: torch.cuda.Event | None  # None: nothing had to be copied

    def wait(self) -> None:
        """Let the device's current stream wait for the copy; this thread goes on at once."""
        if self.copied is not None:
            torch.cuda.current_stream(self.images_BCHW.device).wait_event(self.copied)


def on_device(batches: Generator[Batch, None, None], device: torch.device, epoch: int = 0) -> Generator[DeviceBatch, None, None]:
    """The loader's batches on `device`; closing this closes `batches`. On the CPU they pass through as they are.

    On a GPU, batch k+1 is copied on a stream of its own while the step on batch k runs: it is taken from the loader before k
    is given out, and its copy begins when the device has finished step k-1. At most three uint8 batches are on the device.
    A step waits for its own copy only, on the device, by `DeviceBatch.wait`.

    The contract with the loader: the memory of host batch k is not read any more when batch k+2 is asked for; the loader may
    fill it again from then on. Should the copy not be over by then, this thread sleeps until it is. The device has step k
    to do by then, which follows that copy: no step is late for it, and the thread is at most two steps ahead of the device.
    """
    with contextlib.closing(batches):
        yield from _pass(batches, epoch) if device.type != "cuda" else _copy_ahead(batches, device, epoch)


def _pass(batches: Generator[Batch, None, None], epoch: int) -> Generator[DeviceBatch, None, None]:
    for batch in batches:
        yield DeviceBatch(batch.images_BCHW, batch.labels_B, batch.indices_B, epoch, batch.position, None)


def _copy_ahead(batches: Generator[Batch, None, None], device: torch.device, epoch: int) -> Generator[DeviceBatch, None, None]:
    stream = torch.cuda.Stream(device)
    ready: tuple[DeviceBatch, torch.cuda.Event] | None = None
    try:
        for batch in batches:
            following = _copy(batch, device, epoch, stream)
            if ready is not None:
                yield ready[0]
                ready[1].synchronize()  # type: ignore[no-untyped-call]
            ready = following
        if ready is not None:
            yield ready[0]
    finally:
        # A batch that nobody waited for gives its memory back to the step's stream, which must not write to it too early.
        torch.cuda.current_stream(device).wait_stream(stream)


def _copy(batch: Batch, device: torch.device, epoch: int, stream: torch.cuda.Stream) -> tuple[DeviceBatch, torch.cuda.Event]:
    """Begin to copy a batch in `stream`.

    The memory belongs to the current stream, which may still be using what lay there before: the copy waits for all that
    the stream was given so far. Later use is ordered by `wait`, so that the allocator needs no `record_stream`.
    """
    stream.wait_stream(torch.cuda.current_stream(device))
    tensors = [torch.empty_like(tensor, device=device) for tensor in (batch.images_BCHW, batch.labels_B, batch.indices_B)]
    with torch.cuda.stream(stream):
        for there, here in zip(tensors, (batch.images_BCHW, batch.labels_B, batch.indices_B), strict=True):
            there.copy_(here, non_blocking=True)
    copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # sleeps: the CPU belongs to the loader's threads
    copied.record(stream)
    images_BCHW, labels_B, indices_B = tensors
    return DeviceBatch(images_BCHW, labels_B, indices_B, epoch, batch.position, copied), copied
