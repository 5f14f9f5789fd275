"""Batches for one worker: which samples, in what order, read by threads, ahead of the training loop.

Shapes: B samples of this rank's part of a global batch, C=3 channels, H=W=data.image_size pixels, N samples of the split.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from functools import partial
from threading import Event
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from trainables.config import DataConfig
from trainables.data.augment import uniforms
from trainables.data.decode import UnreadableImageError
from trainables.data.memory import MemorySource
from trainables.data.order import Order, Sharded, Split, rank_part
from trainables.data.source import Source
from trainables.data.view import View
from trainables.errors import DataError

_CHUNKS_PER_THREAD = 4  # of a batch: few enough to cost nothing, enough that no thread waits long for the slowest
_NAMED_IN_ERROR = 3

_Bad = list[tuple[int, str]]  # row of the batch, why it cannot be read


class Batch(NamedTuple):
    """One rank's part of a global batch. B may differ by rank and may be 0."""

    images_BCHW: torch.Tensor  # uint8, channels last in memory
    labels_B: torch.Tensor  # int64
    indices_B: torch.Tensor  # int64, dataset-wide
    position: int  # global samples of this epoch that are consumed once this batch is trained on


class _Pending(NamedTuple):
    """A batch whose rows are being filled."""

    images_BHWC: torch.Tensor
    indices_B: NDArray[np.int64]
    position: int
    parts: list[Future[_Bad]]


class Loader:
    """Reads one split for one rank.

    Global batch k of an epoch covers [k·G, (k+1)·G) of the epoch's `Order`, which depends on (seed, epoch) alone and never
    stands in memory; each rank takes a contiguous part. With `data.last_batch: drop` training leaves out the incomplete last
    batch; validation never does. `loader_workers` threads work ahead by `data.prefetch_batches`; with 0 the caller's thread
    does the work. One epoch runs at a time: starting one ends the one before.

    `skipped` maps the name of each unreadable image that this rank met in this epoch to the reason; those images are
    missing from their batches, and more than `max_bad` of them (see `data.max_bad`) are a DataError.

    Raises DataError where `drop` would leave no batch, or a resize would be smaller than its crop.
    """

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
        pin_memory: bool = False,
    ) -> None:
        if data.val_resize is not None and data.val_resize < data.image_size:
            raise DataError(
                f"data.val_resize: {data.val_resize} is below data.image_size={data.image_size}; "
                f"write at least {data.image_size}, or leave it out"
            )
        num_samples, batch = len(source), data.global_batch_size
        self._drop = split == "train" and data.last_batch == "drop"
        if self._drop and num_samples < batch:
            raise DataError(
                f"data.global_batch_size: {batch} is more than the {num_samples} training images; "
                f"write at most {num_samples}, or data.last_batch=short"
            )
        self.steps_per_epoch = num_samples // batch if self._drop else math.ceil(num_samples / batch)
        self.samples_per_epoch = min(self.steps_per_epoch * batch, num_samples)
        self.skipped: dict[str, str] = {}
        # 1e-9: what 0.29 · 100 lacks to 29. A small split has a bad image too: one stops a run only where none is allowed.
        self.max_bad = max(math.floor(data.max_bad * num_samples + 1e-9), 1 if data.max_bad else 0)
        self._source, self._data, self._seed = source, data, seed
        self._rank, self._world_size, self._pin_memory = rank, world_size, pin_memory
        self._order = Order(
            split, data.shuffle, seed=seed, num_samples=num_samples,
            shard_sizes=source.shard_sizes if isinstance(source, Sharded) else None,
        )  # fmt: skip
        self._view = View(data, split)
        self._loader_workers = loader_workers
        self._pool = ThreadPoolExecutor(loader_workers, thread_name_prefix="loader") if loader_workers else None
        self._stop = Event()

    def epoch(self, epoch: int, start: int = 0) -> Generator[Batch, None, None]:
        """The batches of an epoch from position `start` (a batch's `position`) on; none where nothing is left.

        Closing the iterator early, or an exception in it, ends the work of its threads before it returns.
        Raises DataError while iterating where more than `max_bad` images are unreadable.
        """
        self._stop.set()
        self._stop = Event()
        self.skipped = {}
        return self._batches(epoch, start, self._stop)

    def close(self) -> None:
        """End all work and the threads. A closed loader reads no more."""
        self._stop.set()
        if self._pool:
            self._pool.shutdown(wait=True, cancel_futures=True)

    def _batches(self, epoch: int, start: int, stop: Event) -> Generator[Batch, None, None]:
        batch, num_samples = self._data.global_batch_size, len(self._source)
        last = num_samples - batch + 1 if self._drop else num_samples
        begins = iter(range(start, last, batch))
        ahead = self._data.prefetch_batches if self._pool else 0
        pending: deque[_Pending] = deque()
        try:
            while True:
                while len(pending) <= ahead and (begin := next(begins, None)) is not None:
                    pending.append(self._begin(begin, min(begin + batch, num_samples), epoch, stop))
                if not pending:
                    return
                ready = self._finish(pending[0])
                pending.popleft()
                yield ready
        finally:
            stop.set()
            parts = [part for unfinished in pending for part in unfinished.parts]
            wait([part for part in parts if not part.cancel()])

    def _begin(self, begin: int, end: int, epoch: int, stop: Event) -> _Pending:
        """Set the threads to work on this rank's part of the global batch [begin, end)."""
        indices_B = self._order.at(epoch, np.arange(*rank_part(begin, end, self._rank, self._world_size)))
        size = self._data.image_size
        images_BHWC = torch.empty((len(indices_B), size, size, 3), dtype=torch.uint8, pin_memory=self._pin_memory)
        pixels_BHWC = images_BHWC.numpy()
        chunks = max(1, self._loader_workers * _CHUNKS_PER_THREAD)
        rows = max(1, math.ceil(len(indices_B) / chunks))
        parts = [
            self._run(partial(self._fill, row, indices_B[row : row + rows], pixels_BHWC[row : row + rows], epoch, stop))
            for row in range(0, len(indices_B), rows)
        ]
        return _Pending(images_BHWC, indices_B, end, parts)

    def _run(self, work: Callable[[], _Bad]) -> Future[_Bad]:
        if self._pool:
            return self._pool.submit(work)
        done: Future[_Bad] = Future()
        done.set_result(work())
        return done

    def _fill(self, first_row: int, indices_B: NDArray[np.int64], out_BHWC: NDArray[np.uint8], epoch: int, stop: Event) -> _Bad:
        """Read the samples into their rows; the rows that could not be filled. Runs in a loader thread."""
        source, view = self._source, self._view
        if isinstance(source, MemorySource) and view.leaves(source.size):
            source.read_batch(indices_B, out_BHWC)
            return []
        uniforms_BU = uniforms(self._seed, epoch, indices_B, view.num_uniforms)
        bad = []
        for row, index in enumerate(indices_B.tolist()):
            if stop.is_set():
                raise CancelledError
            try:
                view.into(source.read(index), uniforms_BU[row], out_BHWC[row])
            except UnreadableImageError as error:
                bad.append((first_row + row, str(error)))
        return bad

    def _finish(self, pending: _Pending) -> Batch:
        """Wait for a batch's rows and leave out the unreadable ones."""
        images_BHWC, indices_B = pending.images_BHWC, pending.indices_B
        bad = dict(entry for part in pending.parts for entry in part.result())
        if bad:
            self.skipped |= {self._source.name(int(indices_B[row])): reason for row, reason in bad.items()}
            self.refuse_too_many(self.skipped)
            good = [row for row in range(len(indices_B)) if row not in bad]
            images_BHWC[: len(good)] = images_BHWC[good]  # inside the same memory, which may be pinned
            images_BHWC, indices_B = images_BHWC[: len(good)], indices_B[good]
        images_BCHW = images_BHWC.permute(0, 3, 1, 2)
        return Batch(images_BCHW, self._tensor(self._source.labels_N[indices_B]), self._tensor(indices_B), pending.position)

    def refuse_too_many(self, skipped: Mapping[str, str]) -> None:
        """Raises DataError where an epoch's unreadable images of this split, name → reason, are more than `max_bad`."""
        if len(skipped) > self.max_bad:
            first = [f"{name} ({reason})" for name, reason in list(skipped.items())[:_NAMED_IN_ERROR]]
            raise DataError(
                f"{len(skipped)} unreadable images in one epoch, more than the {self.max_bad} of {len(self._source)} that "
                f"data.max_bad={self._data.max_bad:g} allows: {', '.join(first)}{', …' if len(skipped) > len(first) else ''}; "
                "mend or remove them, or raise the limit"
            )

    def _tensor(self, values_B: NDArray[np.int64]) -> torch.Tensor:
        tensor_B = torch.from_numpy(values_B)
        return tensor_B.pin_memory() if self._pin_memory else tensor_B
