"""Batches for one worker: which samples, in what order, read by threads, ahead of the training loop.

Shapes: B samples of this rank's part of a global batch, C=3 channels, H=W=data.image_size pixels, N samples of the split.
"""

import logging
import math
import time
from collections import deque
from collections.abc import Generator, Mapping
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from trainables.config import DataConfig
from trainables.data.augment import Augment
from trainables.data.encoded_rows import EncodedRows
from trainables.data.interface import Source
from trainables.data.loader.auto_workers import AutoWorkers
from trainables.data.loader.batch_layout import BatchLayout
from trainables.data.loader.batch_memory import BatchMemory
from trainables.data.loader.batch_reader import BatchReader, Reads, Request
from trainables.data.loader.loader_process import LoaderProcess
from trainables.data.loader.sample_reader import Costs, ReadResult
from trainables.data.order import Split, rank_part
from trainables.errors import DataError
from trainables.rules import enough_images, resize_covers_crop

log = logging.getLogger("raydistill")

_NAMED_IN_ERROR = 3
_CPU = torch.device("cpu")


class Batch(NamedTuple):
    """One rank's part of a global batch. B may differ by rank and may be 0.

    Its tensors are valid for as long as anything refers to one of them; then their memory serves a later batch.
    """

    images_BCHW: torch.Tensor  # uint8, channels last in memory
    labels_B: torch.Tensor  # int64
    indices_B: torch.Tensor  # int64, dataset-wide
    position: int  # global samples of this epoch that are consumed once this batch is trained on
    num_samples: int | None = None  # of all ranks; None: others may have left out images that cannot be read
    encoded_rows: EncodedRows | None = None  # rows without pixels, which `on_device` decodes


class _Pending(NamedTuple):
    """A batch whose pixels are being read."""

    batch: Batch
    reads: Reads


class Loader:
    """Reads one split for one rank.

    Global batch k of an epoch covers [k·G, (k+1)·G) of the epoch's `Order`, which depends on (seed, epoch) alone and never
    stands in memory; each rank takes a contiguous part. With `data.last_batch: drop` training leaves out the incomplete last
    batch; validation never does. `loader_workers` threads work ahead by `data.prefetch_batches`, in `process` where there is
    one; with 0 the caller's thread does the work. One epoch runs at a time: starting one ends the one before. Its batches take
    `batches_mib` MiB of memory, pinned where `device` is a GPU. With `auto`, `loader_workers` is the most threads and `auto`
    decides how many work. With `num_augmentation_epochs` n images are augmented as in epochs 0, 1, … n - 1 and then again; the
    order never repeats.

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
        process: LoaderProcess | None = None,
        auto: AutoWorkers | None = None,
        num_augmentation_epochs: int | None = None,
    ) -> None:
        num_samples, batch = len(source), data.global_batch_size
        self._drop = split == "train" and data.last_batch == "drop"
        problem = resize_covers_crop(data) or (enough_images(data, num_samples) if split == "train" else None)
        if problem is not None:
            raise DataError(problem)
        self.steps_per_epoch = num_samples // batch if self._drop else math.ceil(num_samples / batch)
        self.samples_per_epoch = min(self.steps_per_epoch * batch, num_samples)
        self.skipped: dict[int, str] = {}
        # 1e-9: what 0.29 · 100 lacks to 29. A small split has a bad image too: one stops a run only where none is allowed.
        self.max_bad = max(math.floor(data.max_bad * num_samples + 1e-9), 1 if data.max_bad else 0)
        self._is_complete = self.max_bad == 0 or source.size is not None  # an image that cannot be read ends the job
        self.source, self._data = source, data
        self._rank, self._world_size = rank, world_size
        self.decoder = Augment(data, split).decoder
        """Which library decodes JPEG, see DECODERS and REGION_DECODERS."""
        self._num_augmentation_epochs = num_augmentation_epochs
        self._auto_workers, self._most_threads = auto, max(1, loader_workers)
        self.costs = Costs(self._most_threads)
        self._prefetch_batches = data.prefetch_batches if loader_workers else 0
        self.max_rows = math.ceil(min(batch, num_samples) / world_size)
        """The most samples of one batch."""
        open_reader = process.open if process and loader_workers else BatchReader
        self._reader = open_reader(source, data, split=split, seed=seed, rank=rank, world_size=world_size, threads=loader_workers)
        layout, pinned = BatchLayout(self.max_rows, data.image_size), device.type == "cuda"
        self._memory = process.memory if process and loader_workers else BatchMemory(layout, pinned=pinned)
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

        Loaders with a process have it in common. Whoever uses more than one batch at a time takes more; so do copies to a GPU,
        whose memory is free a little later.
        """
        return (self._prefetch_batches + 2) * self._memory.block_bytes / 2**20

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

    def resize(self, threads: int) -> None:
        """Go on with so many threads (at least 1); what was set to work is finished by those that there were."""
        self._reader.resize(threads)
        self.costs.threads = threads

    def _batches(self, epoch: int, start: int, iteration: int) -> Generator[Batch, None, None]:
        batch, num_samples = self._data.global_batch_size, len(self.source)
        last = num_samples - batch + 1 if self._drop else num_samples
        begins = iter(range(start, last, batch))
        pending: deque[_Pending] = deque()
        last_ready_s = None  # when the batch before was returned
        try:
            while True:
                while len(pending) <= self._prefetch_batches and (begin := next(begins, None)) is not None:
                    end = min(begin + batch, num_samples)
                    pending.append(self._begin(Request(iteration, epoch, self.augmentation_epoch(epoch), begin, end)))
                if not pending:
                    return
                waits, wait_began_s = not pending[0].reads.done(), time.perf_counter()
                parts = pending[0].reads.results()
                now_s = time.perf_counter()
                wait_s = now_s - wait_began_s if waits else 0.0
                ready = self._finish(pending[0], parts)
                num_images = ready.labels_B.shape[0]  # `len` of a tensor is a function of torch in Python
                if self._auto_workers and last_ready_s is not None:
                    decode_s = sum(part.times.image_s for part in parts)
                    self._adapt(self._auto_workers, num_images, decode_s, wait_s, now_s - last_ready_s)
                self.costs.add(num_images, parts, wait_s)
                last_ready_s = now_s
                pending.popleft()
                yield ready
                del ready  # its memory is free once the consumer has done with it
        finally:
            self._reader.stop(iteration)
            for unfinished in pending:
                unfinished.reads.end()

    def _begin(self, request: Request) -> _Pending:
        """Begin to read this rank's part of a global batch."""
        begin, end = rank_part(request.begin, request.end, self._rank, self._world_size)
        block = self._memory.allocate(end - begin)
        reads = self._reader.begin(request, block)
        num_samples = request.end - request.begin if self._is_complete else None
        return _Pending(Batch(block.images_BCHW, block.labels_B, block.indices_B, request.end, num_samples), reads)

    def _finish(self, pending: _Pending, parts: list[ReadResult]) -> Batch:
        """The batch whose pixels are read, without the unreadable images."""
        batch = pending.batch
        bad = dict(entry for part in parts for entry in part.bad)
        regions = [region for part in parts for region in part.encoded_rows]
        if bad:
            self._skip(batch.indices_B, bad)
            good = [row for row in range(len(batch.labels_B)) if row not in bad]
            new_rows = {row: new_row for new_row, row in enumerate(good)}
            regions = [region._replace(row=new_rows[region.row]) for region in regions]
            images_BCHW, labels_B, numbers_B = (_moved_up(tensor, good) for tensor in batch[:3])
            batch = Batch(images_BCHW, labels_B, numbers_B, batch.position, batch.num_samples)
        if not regions:
            return batch
        skip = partial(self._skip, batch.indices_B.clone())  # a clone: it must not keep the memory of the whole batch
        return batch._replace(encoded_rows=EncodedRows(self.decoder, regions, self._most_threads, skip))

    def _skip(self, indices_B: Tensor, bad: Mapping[int, str]) -> None:
        """Count the rows of a batch that hold no whole image, row → reason. Raises DataError where an epoch has too many."""
        for row, reason in bad.items():
            index = int(indices_B[row])
            self.skipped[index] = f"{self.source.name(index)} ({reason})"
        self.refuse_too_many(self.skipped)

    def _adapt(self, auto: AutoWorkers, images: int, decode_s: float, wait_s: float, wall_s: float) -> None:
        if line := auto.add(images, decode_s, wait_s, wall_s):
            log.info("%s", line)
            self.resize(auto.threads)

    def refuse_too_many(self, skipped: Mapping[int, str]) -> None:
        """Raises DataError where an epoch's unreadable images of this split (see `skipped`) are more than `max_bad`."""
        if len(skipped) > self.max_bad:
            first = list(skipped.values())[:_NAMED_IN_ERROR]
            raise DataError(
                f"{len(skipped)} unreadable images in one epoch, more than the {self.max_bad} of {len(self.source)} that "
                f"data.max_bad={self._data.max_bad:g} allows: {', '.join(first)}{', …' if len(skipped) > len(first) else ''}; "
                "fix or remove them, or raise the limit"
            )


def _moved_up(tensor: Tensor, rows: list[int]) -> Tensor:
    """These rows alone, inside the same memory, which may be pinned."""
    tensor[: len(rows)] = tensor[rows]
    return tensor[: len(rows)]
