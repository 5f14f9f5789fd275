"""Batches for the ranks of one replica: the first pipeline stage reads them, in training the last one gets the images too.

Shapes: B samples of this replica's part of a global batch, C=3 channels, H=W=data.image_size pixels.
"""

import contextlib
from collections.abc import Generator
from typing import Any

import torch
import torch.distributed as dist

from trainables.data.loader.loader import Batch, Loader
from trainables.distributed.group import Group
from trainables.metrics.phases import RECEIVE

_Header = tuple[list[int], list[int], int, int | None]
"""The labels, indices and position of a batch."""


class PipelineLoader(Loader):
    """All ranks of a replica get the same batches, see `Loader`.

    The first stage reads them and sends them from host to host; each rank then copies its own to its device.
    """

    def __init__(self, *arguments: Any, hosts: Group, loader_workers: int, **options: Any) -> None:
        """`hosts`: the ranks of the replica, for CPU tensors."""
        super().__init__(*arguments, loader_workers=loader_workers if hosts.is_main else 0, **options)
        self._hosts = hosts
        if not hosts.is_main:
            self.wait_phase = RECEIVE
        self._last_has_images = options["split"] == "train"  # for the teacher and the methods

    def epoch(self, epoch: int, start: int = 0) -> Generator[Batch, None, None]:
        """See `Loader.epoch`. The pixels are undefined between the first and the last stage, in evaluation on the last too."""
        batches = super().epoch(epoch, start)
        return self._send(batches) if self._hosts.is_main else self._receive()

    def _send(self, batches: Generator[Batch, None, None]) -> Generator[Batch, None, None]:
        sent: dist.Work | None = None
        with contextlib.closing(batches):
            for batch in batches:
                self._broadcast((batch.labels_B.tolist(), batch.indices_B.tolist(), batch.position, batch.num_samples))
                if sent is not None:
                    sent.wait()
                if len(batch.labels_B) and self._last_has_images:
                    images_BHWC = batch.images_BCHW.permute(0, 2, 3, 1)
                    sent = dist.isend(images_BHWC, group_dst=self._hosts.world_size - 1, group=self._hosts.process_group)
                yield batch
        self._broadcast(None)
        if sent is not None:
            sent.wait()

    def _receive(self) -> Generator[Batch, None, None]:
        while (header := self._broadcast(None)) is not None:
            labels, indices, position, num_samples = header
            images_BCHW, labels_B, indices_B, _ = self._memory.allocate(len(labels))
            labels_B.copy_(torch.tensor(labels))
            indices_B.copy_(torch.tensor(indices))
            if labels and self._last_has_images and self._hosts.rank == self._hosts.world_size - 1:
                dist.recv(images_BCHW.permute(0, 2, 3, 1), group_src=0, group=self._hosts.process_group)
            yield Batch(images_BCHW, labels_B, indices_B, position, num_samples)

    def _broadcast(self, header: _Header | None) -> _Header | None:
        """The first stage's header, on all stages; None: the epoch has no more batches."""
        headers = [header]
        dist.broadcast_object_list(headers, group_src=0, group=self._hosts.process_group)
        return headers[0]
