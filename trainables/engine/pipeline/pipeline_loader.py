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
        hosts, sending = self._hosts, None
        with contextlib.closing(super().epoch(epoch, start)) as batches:
            while True:
                batch = next(batches, None) if hosts.is_main else None
                headers = [None if batch is None else (batch.labels_B.tolist(), batch.views_B.tolist(), *batch[3:5])]
                dist.broadcast_object_list(headers, group_src=0, group=hosts.process_group)
                if sending is not None:
                    sending.wait()
                if headers[0] is None:
                    return
                batch = batch or self._received(*headers[0])
                if len(batch.labels_B) and self._last_has_images:
                    images_BHWC, last = batch.images_BCHW.permute(0, 2, 3, 1), hosts.world_size - 1
                    if hosts.is_main:
                        sending = dist.isend(images_BHWC, group_dst=last, group=hosts.process_group)
                    elif hosts.rank == last:
                        dist.recv(images_BHWC, group_src=0, group=hosts.process_group)
                yield batch

    def _received(self, labels: list[int], views: list[int], position: int, num_samples: int | None) -> Batch:
        """A batch without its pixels."""
        batch = self._lend(self._reader.memory.allocate(), len(labels), position, num_samples)
        batch.labels_B.copy_(torch.tensor(labels))
        batch.views_B.copy_(torch.tensor(views))
        return batch
