"""Batches for the ranks of one replica: the first pipeline stage reads them, and in training the last gets the images too.

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
    """A `Loader` that gives all ranks of a replica the same batches.

    The first stage reads them and sends them from host to host. Each rank then copies them to its device.
    """

    def __init__(self, *arguments: Any, cpu_group: Group, loader_workers: int, **options: Any) -> None:
        """`cpu_group` has the ranks of the replica, and takes CPU tensors."""
        super().__init__(*arguments, loader_workers=loader_workers if cpu_group.is_main else 0, **options)
        self._cpu_group = cpu_group
        if not cpu_group.is_main:
            self.wait_phase = RECEIVE
        self._last_has_images = options["split"] == "train"  # the teacher and the methods need them

    def epoch(self, epoch: int, start: int = 0) -> Generator[Batch, None, None]:
        """See `Loader.epoch`. The pixels are undefined on the middle stages, and in evaluation on the last stage too."""
        cpu_group, sending = self._cpu_group, None
        with contextlib.closing(super().epoch(epoch, start)) as batches:
            while True:
                batch = next(batches, None) if cpu_group.is_main else None
                headers = [None if batch is None else (batch.labels_B.tolist(), batch.views_B.tolist(), *batch[3:5])]
                dist.broadcast_object_list(headers, group_src=0, group=cpu_group.process_group)
                if sending is not None:
                    sending.wait()
                if headers[0] is None:
                    return
                batch = batch or self._batch_without_pixels(*headers[0])
                if len(batch.labels_B) and self._last_has_images:
                    images_BHWC, last = batch.images_BCHW.permute(0, 2, 3, 1), cpu_group.world_size - 1
                    if cpu_group.is_main:
                        sending = dist.isend(images_BHWC, group_dst=last, group=cpu_group.process_group)
                    elif cpu_group.rank == last:
                        dist.recv(images_BHWC, group_src=0, group=cpu_group.process_group)
                yield batch

    def _batch_without_pixels(self, labels: list[int], views: list[int], position: int, num_samples: int | None) -> Batch:
        """Build a batch whose pixels are undefined."""
        batch = self._lend(self._reader.memory.allocate(), len(labels), position, num_samples)
        batch.labels_B.copy_(torch.tensor(labels))
        batch.views_B.copy_(torch.tensor(views))
        return batch
