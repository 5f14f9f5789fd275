"""A loader's batches on the device, the next one copied, and decoded where that is left to it, while the current one trains.

Shapes: B samples of this rank's part of a global batch, C=3 channels, H=W=data.image_size pixels.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from trainables.data.loader.loader import Batch, EncodedRows
from trainables.data.order import REPEAT
from trainables.device.bind import bind_thread
from trainables.device.decode import decode_regions, region_decoder
from trainables.device.mixing import Mix


class DeviceBatch(NamedTuple):
    """One rank's part of a global batch, on the device as soon as `wait` was called; or a micro-batch, a part of that."""

    images_BCHW: Tensor  # uint8, channels last in memory; once `TrainInputs` has prepared the batch, the models' input
    labels_B: Tensor  # int64
    views_B: Tensor  # int64: the dataset-wide index, and which repeat of the image, see `order.REPEAT`
    host_indices_B: Tensor  # indices_B on the host
    epoch: int  # the one by which it is augmented
    position: int = 0  # global samples of the epoch that are consumed once this batch is trained on
    num_samples: int | None = None  # of all ranks, where that is known without them
    copied: torch.cuda.Event | None = None  # None: nothing had to be copied
    mix: Mix | None = None  # None: an image shows its own label alone

    @property
    def indices_B(self) -> Tensor:
        """int64, dataset-wide."""
        return self.views_B % REPEAT

    def wait(self) -> None:
        """Let the device's current stream wait for the copy; this thread goes on at once."""
        if self.copied is not None:
            torch.cuda.current_stream(self.images_BCHW.device).wait_event(self.copied)

    def split(self, sizes: Sequence[int]) -> list[DeviceBatch]:
        """The batch in micro-batches of so many samples each, in order."""
        tensors = (self.images_BCHW, self.labels_B, self.views_B, self.host_indices_B, *(self.mix or ()))
        return [
            DeviceBatch(images_BCHW, labels_B, views_B, host_indices_B, self.epoch, mix=Mix(*mix) if mix else None)
            for images_BCHW, labels_B, views_B, host_indices_B, *mix in zip(
                *(tensor.split(list(sizes)) for tensor in tensors), strict=True
            )
        ]


def on_device(
    batches: Generator[Batch, None, None],
    device: torch.device,
    epoch: int = 0,
    on_copied: Callable[[float], None] = lambda seconds: None,
) -> Generator[DeviceBatch, None, None]:
    """The loader's batches on `device`; closing this closes `batches`. On the CPU they pass through as they are.

    `on_copied` is called with the seconds that each copy has taken on the device, its decoding there included.

    On a GPU, batch k+1 is copied on a stream of its own while the step on batch k runs: it is taken from the loader before k
    is yielded, and its copy begins when the device has finished step k-1. At most three uint8 batches are on the device.
    A step waits for its own copy only, on the device, by `DeviceBatch.wait`.

    Batch k+2 is taken from the loader when the copy of batch k is over, and this thread sleeps until then: it is at most two
    steps ahead of the device, and the loader's memory is that of a few batches. The device has step k to do by then, which
    follows that copy: no step is late for it.

    Encoded rows of a batch are decoded in the same stream, by a thread of its own, since nvJPEG keeps the one that calls it:
    on the device it begins when step k-1 is done, and k does not wait for it. Rows that cannot be decoded are left out.
    """
    with contextlib.closing(batches):
        yield from _pass(batches, epoch) if device.type != "cuda" else _copy_ahead(batches, device, epoch, on_copied)


def _pass(batches: Generator[Batch, None, None], epoch: int) -> Generator[DeviceBatch, None, None]:
    for batch in batches:
        images_BCHW, labels_B, views_B, position, num_samples, _ = batch
        ready = DeviceBatch(images_BCHW, labels_B, views_B, batch.indices_B, epoch, position, num_samples)
        if batch.encoded_rows is not None:
            decoder = region_decoder(batch.images_BCHW.device, batch.encoded_rows.threads)
            ready = _without(decode_regions(decoder, batch.encoded_rows.regions, batch.images_BCHW), ready, batch.encoded_rows)
        yield ready


def _without(bad: Mapping[int, str], batch: DeviceBatch, encoded_rows: EncodedRows) -> DeviceBatch:
    """The batch without these rows, row → reason, which the loader counts. Raises DataError where they are too many."""
    if not bad:
        return batch
    encoded_rows.skip(bad)
    batch.wait()
    good = [row for row in range(len(batch.labels_B)) if row not in bad]
    host_indices_B = batch.host_indices_B[good]
    rows_B = torch.tensor(good, dtype=torch.int64, device=batch.labels_B.device)
    images_BCHW = batch.images_BCHW[rows_B].contiguous(memory_format=torch.channels_last)
    labels_B, views_B = batch.labels_B[rows_B], batch.views_B[rows_B]
    copied = None
    if batch.copied is not None:  # who waits for the batch waits for these rows, in whatever stream
        copied = torch.cuda.Event()
        copied.record(torch.cuda.current_stream(images_BCHW.device))
    return batch._replace(
        images_BCHW=images_BCHW, labels_B=labels_B, views_B=views_B, host_indices_B=host_indices_B, copied=copied
    )


class _Copy(NamedTuple):
    """A batch whose copy has begun."""

    batch: DeviceBatch
    host: Batch  # whose memory the loader may write to again once nothing refers to it
    began: torch.cuda.Event
    copied: torch.cuda.Event
    decoded: Future[dict[int, str]] | None
    """Done when `copied` is recorded; the rows that cannot be decoded."""

    def result(self) -> DeviceBatch:
        """The batch without the images that cannot be decoded. Waits for the decoder's thread, but not for the copy."""
        if self.host.encoded_rows is None or self.decoded is None:
            return self.batch
        return _without(self.decoded.result(), self.batch, self.host.encoded_rows)


@functools.cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all epochs: torch hands out 32 in turn, so that another one each time would come to be one that is in use."""
    return torch.cuda.Stream(device)


def _copy_ahead(
    batches: Generator[Batch, None, None], device: torch.device, epoch: int, on_copied: Callable[[float], None]
) -> Generator[DeviceBatch, None, None]:
    stream = _copy_stream(device)
    current: _Copy | None = None
    try:
        with ThreadPoolExecutor(1, "decode", bind_thread, (device,)) as decoder:
            for batch in batches:
                # before the next copy, which waits for a step: what is still to be decoded must not stand behind it
                ready = current.result() if current else None
                following = _copy(batch, device, epoch, stream, decoder)
                if current and ready:
                    yield ready
                    current.copied.synchronize()  # type: ignore[no-untyped-call]
                    on_copied(current.began.elapsed_time(current.copied) / 1e3)  # type: ignore[no-untyped-call]
                current = following
            if current:
                yield current.result()
    finally:
        # Nobody may have waited for the last copy: the loader must not write too early to its memory, nor a step to the device's.
        stream.synchronize()


def _copy(batch: Batch, device: torch.device, epoch: int, stream: torch.cuda.Stream, decoder: ThreadPoolExecutor) -> _Copy:
    """Begin to copy a batch in `stream`.

    The memory belongs to the current stream, which may still be using what lay there before: the copy waits for all that
    the stream was given so far. Later use is ordered by `wait`, so that the allocator needs no `record_stream`.
    """
    stream.wait_stream(torch.cuda.current_stream(device))
    tensors = [torch.empty_like(tensor, device=device) for tensor in (batch.images_BCHW, batch.labels_B, batch.views_B)]
    images_BCHW, labels_B, views_B = tensors
    encoded_rows = batch.encoded_rows
    began = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):
        began.record(stream)
        if encoded_rows is None or len(encoded_rows.regions) < len(images_BCHW):
            images_BCHW.copy_(batch.images_BCHW, non_blocking=True)
        labels_B.copy_(batch.labels_B, non_blocking=True)
        views_B.copy_(batch.views_B, non_blocking=True)
    # A blocking event: the waiting thread sleeps and leaves its core to the loader.
    copied = torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]
    decoded = None
    if encoded_rows is None:
        copied.record(stream)
    else:
        decoded = decoder.submit(_decode, encoded_rows, images_BCHW, stream, copied)
    host_indices_B = batch.indices_B  # computed, so that it does not keep the memory of the whole batch
    ready = DeviceBatch(images_BCHW, labels_B, views_B, host_indices_B, epoch, batch.position, batch.num_samples, copied)
    return _Copy(ready, batch, began, copied, decoded)


def _decode(
    encoded_rows: EncodedRows, images_BCHW: Tensor, stream: torch.cuda.Stream, copied: torch.cuda.Event
) -> dict[int, str]:
    device = images_BCHW.device
    with torch.cuda.stream(stream):
        decoder = region_decoder(device, encoded_rows.threads)
        bad = decode_regions(decoder, encoded_rows.regions, images_BCHW)
    copied.record(stream)
    return bad
