"""Batches for one worker: which samples, in what order, read by threads, ahead of the training loop.

Shapes: B samples of this rank's part of a global batch, C=3 channels, H=W=data.image_size pixels, N samples of the split.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from trainables.config import DataConfig
from trainables.data.augment import Augment
from trainables.data.interface import Source
from trainables.data.jpeg import Region
from trainables.data.loader.batch_memory import BatchMemory
from trainables.data.loader.batch_reader import BatchReader, ReadResult, Reads, Request
from trainables.data.loader.costs import Costs
from trainables.data.loader.loader_process import ProcessReader, ProcessReads, uses_process
from trainables.data.order import REPEAT, Split, rank_part
from trainables.errors import DataError
from trainables.rules import enough_images, resize_covers_crop

_NAMED_IN_ERROR = 3
_CPU = torch.device("cpu")


class EncodedRows(NamedTuple):
    """The encoded rows of one batch, in order."""

    regions: list[Region]
    threads: int
    """The number of CPU threads that the device's decoder may use."""
    skip: Callable[[Mapping[int, str]], None]
    """Counts unreadable rows, row → reason; the decoder leaves them out of the batch.

    Raises DataError if there are too many, as the loader does. Call it only in the thread that iterates over the loader.
    """


class Batch(NamedTuple):
    """One rank's part of a global batch. B may differ by rank and may be 0.

    Its tensors are valid for as long as anything refers to one of them; then their memory serves a later batch.
    """

    images_BCHW: torch.Tensor  # uint8, channels last in memory
    labels_B: torch.Tensor  # int64
    views_B: torch.Tensor  # int64: the dataset-wide index, and which repeat of the image, see `order.REPEAT`
    position: int  # global samples of this epoch that are consumed once this batch is trained on
    num_samples: int | None = None  # of all ranks; None: others may have left out images that cannot be read
    encoded_rows: EncodedRows | None = None  # rows without pixels, which `on_device` decodes

    @property
    def indices_B(self) -> torch.Tensor:
        """int64, dataset-wide."""
        return self.views_B % REPEAT


class _Pending(NamedTuple):
    """A batch whose pixels are being read."""

    request: Request
    block: int
    reads: Reads | ProcessReads


class Loader:
    """Reads one split for one rank.

    Global batch k of an epoch covers [k·G, (k+1)·G) of the epoch's `Order`, which depends on (seed, epoch) alone and never
    stands in memory; each rank takes a contiguous part. With `data.last_batch: drop` training leaves out the incomplete last
    batch; validation never does. `loader_workers` threads work ahead by `data.prefetch_batches`, in this process or in one of
    their own, see `uses_process`; with 0 the caller's thread does the work. One epoch runs at a time: starting one ends the one
    before. Its batches take `batches_mib` MiB of memory, pinned where `device` is a GPU. With `num_augmentation_epochs` n images
    are augmented as in epochs 0, 1, … n - 1 and then again; the order repeats with them where images are mixed, as it decides
    with which, and else never. Of several sets (`data.more`) an epoch is one pass over the first, see `MixedOrder`.

    `skipped` maps the dataset-wide index of each unreadable image that this rank met in this epoch to its name and the reason,
    `NAME (REASON)`; those images are missing from their batches, and more than `max_bad` of them (see `data.max_bad`) are a
    DataError.

    Raises DataError where `drop` would leave no batch, or a resize would be smaller than its crop.
    """

    wait_phase = "data"
    """As which phase of a step the wait for its next batch counts."""

    def __init__(
        self,
        source: Source,
        data: DataConfig,
        *,
        split: Split,
        seed: int,
        rank: int,
        world_size: int,
        loader_workers: int,
        device: torch.device = _CPU,
        num_augmentation_epochs: int | None = None,
    ) -> None:
        num_samples, batch = source.order(data, split, seed).num_samples, data.global_batch_size
        self._drop = split == "train" and data.last_batch == "drop"
        problem = resize_covers_crop(data) or (enough_images(data, len(source.sets[0])) if split == "train" else None)
        if problem is not None:
            raise DataError(problem)
        self._epoch_size = num_samples
        self.steps_per_epoch = num_samples // batch if self._drop else math.ceil(num_samples / batch)
        self.samples_per_epoch = min(self.steps_per_epoch * batch, num_samples)
        self.skipped: dict[int, str] = {}
        # 1e-9 guards against float rounding. A small split has a bad image too: one stops a run only where none is allowed.
        self.max_bad = max(math.floor(data.max_bad * len(source) + 1e-9), 1 if data.max_bad else 0)
        self._is_complete = self.max_bad == 0 or source.size is not None  # an image that cannot be read ends the job
        self.source, self._data = source, data
        self._rank, self._world_size = rank, world_size
        self.decoder = Augment(data, split).decoder
        """What decodes JPEG: turbojpeg, pil or gpu."""
        self._num_augmentation_epochs = num_augmentation_epochs
        self._threads = max(1, loader_workers)
        self.costs = Costs(self._threads)
        self._prefetch_batches = data.prefetch_batches if loader_workers else 0
        rows, pinned = math.ceil(min(batch, num_samples) / world_size), device.type == "cuda"
        open_reader: Callable[..., BatchReader | ProcessReader]
        if loader_workers and uses_process(data, device):
            open_reader = partial(ProcessReader, rows, pinned=pinned)
        else:
            open_reader = partial(BatchReader, BatchMemory(rows, data.image_size, pinned=pinned))
        self._reader = open_reader(source, data, split=split, seed=seed, rank=rank, world_size=world_size, threads=loader_workers)
        self._iteration = 0

    @property
    def labels_M(self) -> Tensor:
        """The label of each of the split's M samples, by index: int64."""
        return torch.from_numpy(np.array(self.source.labels_N, dtype=np.int64))  # a copy: packed ones are read-only

    def augmentation_epoch(self, epoch: int) -> int:
        """The epoch by which the images of this one are augmented."""
        return epoch % self._num_augmentation_epochs if self._num_augmentation_epochs else epoch

    @property
    def batches_mib(self) -> float:
        """Memory of the batches in MiB: `data.prefetch_batches`, the one that is returned next and the one in use.

        Whoever uses more than one batch at a time takes more.
        """
        return (self._prefetch_batches + 2) * self._reader.memory.block_bytes / 2**20

    def epoch(self, epoch: int, start: int = 0) -> Generator[Batch, None, None]:
        """The batches of an epoch from position `start` (a batch's `position`) on; none where nothing is left.

        Closing the iterator early, or an exception in it, ends the work of its threads before it returns.
        Raises while iterating: DataError where more than `max_bad` images are unreadable, or where the source's disk or network
        fails; RuntimeError, naming the image, for whatever else a thread died of.
        """
        self._reader.stop(self._iteration)
        self._iteration += 1
        self.skipped = {}
        return self._batches(epoch, start, self._iteration)

    def close(self) -> None:
        """End all work and the threads, and close the source. A closed loader reads no more."""
        self._reader.close()
        self.source.close()

    def _batches(self, epoch: int, start: int, iteration: int) -> Generator[Batch, None, None]:
        batch, num_samples = self._data.global_batch_size, self._epoch_size
        last = num_samples - batch + 1 if self._drop else num_samples
        order_epoch = self.augmentation_epoch(epoch) if self._data.device_augment.mixes else epoch
        begins = iter(range(start, last, batch))
        pending: deque[_Pending] = deque()
        try:
            while True:
                while len(pending) <= self._prefetch_batches and (begin := next(begins, None)) is not None:
                    end = min(begin + batch, num_samples)
                    pending.append(self._begin(Request(iteration, order_epoch, self.augmentation_epoch(epoch), begin, end)))
                if not pending:
                    return
                waits, wait_began_s = not pending[0].reads.done(), time.perf_counter()
                result = pending[0].reads.result()
                wait_s = time.perf_counter() - wait_began_s if waits else 0.0
                ready = self._finish(pending[0], result)
                pending.popleft()
                self.costs.add(ready.labels_B.shape[0], result.times, wait_s)  # `len` of a tensor is slow
                yield ready
                del ready  # its memory is free once the consumer has done with it
        finally:
            self._reader.stop(iteration)
            for unfinished in pending:
                unfinished.reads.settle()
                self._reader.memory.free(unfinished.block)

    def _begin(self, request: Request) -> _Pending:
        """Begin to read this rank's part of a global batch."""
        block = self._reader.memory.allocate()
        try:
            return _Pending(request, block, self._reader.begin(request, block))
        except BaseException:  # without threads this reads
            self._reader.memory.free(block)
            raise

    def _finish(self, pending: _Pending, result: ReadResult) -> Batch:
        """The batch whose pixels are read, without the unreadable images."""
        request, regions = pending.request, result.encoded_rows
        begin, end = rank_part(request.begin, request.end, self._rank, self._world_size)
        rows = end - begin
        if result.bad:
            bad, values = dict(result.bad), self._reader.memory.arrays(pending.block, rows)
            self._skip((values[2] % REPEAT).tolist(), bad)
            good = [row for row in range(rows) if row not in bad]
            for values_B in values:
                values_B[: len(good)] = values_B[good]
            new_rows = {row: new_row for new_row, row in enumerate(good)}
            regions, rows = [region._replace(row=new_rows[region.row]) for region in regions], len(good)
        batch = self._lend(pending.block, rows, request.end, request.end - request.begin if self._is_complete else None)
        if not regions:
            return batch
        skip = partial(self._skip, batch.indices_B.tolist())
        return batch._replace(encoded_rows=EncodedRows(regions, self._threads, skip))

    def _lend(self, block: int, rows: int, position: int, num_samples: int | None) -> Batch:
        """The batch of so many rows that is in a block."""
        images_BHWC, labels_B, views_B = self._reader.memory.lend(block, rows)
        images_BCHW = torch.from_numpy(images_BHWC.transpose(0, 3, 1, 2))
        return Batch(images_BCHW, torch.from_numpy(labels_B), torch.from_numpy(views_B), position, num_samples)

    def _skip(self, indices_B: Sequence[int], bad: Mapping[int, str]) -> None:
        """Count the rows of a batch that hold no whole image, row → reason. Raises DataError where an epoch has too many."""
        self.skipped |= {indices_B[row]: f"{self.source.name(indices_B[row])} ({reason})" for row, reason in bad.items()}
        self.refuse_too_many(self.skipped)

    def refuse_too_many(self, skipped: Mapping[int, str]) -> None:
        """Raises DataError where an epoch's unreadable images of this split (see `skipped`) are more than `max_bad`."""
        if len(skipped) > self.max_bad:
            first = list(skipped.values())[:_NAMED_IN_ERROR]
            raise DataError(
                f"{len(skipped)} unreadable images in one epoch, more than the {self.max_bad} of {len(self.source)} that "
                f"data.max_bad={self._data.max_bad:g} allows: {', '.join(first)}{', …' if len(skipped) > len(first) else ''}; "
                "fix or remove them, or raise the limit"
            )
