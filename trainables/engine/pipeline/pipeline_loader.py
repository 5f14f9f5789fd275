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

_END = -1
"""In place of a batch's number of samples: the epoch has no more."""


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
        last = self._hosts.world_size - 1
        with contextlib.closing(batches):
            for batch in batches:
                header = torch.zeros(2 + 2 * self.max_rows, dtype=torch.int64)
                header[0], header[1] = len(batch.labels_B), batch.position
                labels_B, indices_B = header[2:].chunk(2)
                labels_B[: len(batch.labels_B)], indices_B[: len(batch.labels_B)] = batch.labels_B, batch.indices_B
                dist.broadcast(header, group_src=0, group=self._hosts.process_group)
                if sent is not None:
                    sent.wait()
                if len(batch.labels_B) and self._last_has_images:
                    sent = dist.isend(batch.images_BCHW.permute(0, 2, 3, 1), group_dst=last, group=self._hosts.process_group)
                yield batch
        dist.broadcast(torch.full((2 + 2 * self.max_rows,), _END), group_src=0, group=self._hosts.process_group)
        if sent is not None:
            sent.wait()

    def _receive(self) -> Generator[Batch, None, None]:
        while True:
            header = torch.empty(2 + 2 * self.max_rows, dtype=torch.int64)
            dist.broadcast(header, group_src=0, group=self._hosts.process_group)
            num_rows, position = header[:2].tolist()
            if num_rows == _END:
                return
            images_BCHW, labels_B, indices_B, _ = self._memory.allocate(num_rows)
            for tensor, values in zip((labels_B, indices_B), header[2:].chunk(2), strict=True):
                tensor.copy_(values[:num_rows])
            if num_rows and self._last_has_images and self._hosts.rank == self._hosts.world_size - 1:
                dist.recv(images_BCHW.permute(0, 2, 3, 1), group_src=0, group=self._hosts.process_group)
            yield Batch(images_BCHW, labels_B, indices_B, position)
