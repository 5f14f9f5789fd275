"""The teacher network in a service: augmentation, precision and model as in a worker, for images that workers send.

Shapes: n images, H=W=data.image_size pixels, C=3 channels.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from trainables.config import TrainConfig
from trainables.device.augment import build_train_inputs
from trainables.device.device_batches import DeviceBatch
from trainables.device.precision import with_precision
from trainables.device.tensor_format import autocast, pixels_of
from trainables.distributed.group import Group
from trainables.teachers.network import ROWS, row_network
from trainables.teachers.rows import RowFormat, Rows

Launch = Callable[[Sequence[NDArray[np.uint8]], NDArray[np.int64], int | None], Callable[[], Rows]]
"""Begins a forward pass over images in several arrays (·, H, W, C), n in all, of the samples (n,) in the augmentation of an
epoch; None: as they are. The result waits for their rows (n,)."""


def served_network(config: TrainConfig, classes: Sequence[str], row_format: RowFormat, device: torch.device) -> Launch:
    """`config` is a worker's. Raises CheckpointError, ModelError: the teacher cannot be loaded."""
    config = with_precision(config, Group(device=device))
    teacher, pixels = row_network(config, device, classes, row_format), pixels_of(config)
    prepare, precision, on_gpu = build_train_inputs(config, device), autocast(config.precision, device), device.type == "cuda"

    def launch(images: Sequence[NDArray[np.uint8]], samples_n: NDArray[np.int64], epoch: int | None) -> Callable[[], Rows]:
        # Pinned: a copy from other memory would wait for all work that the GPU has queued.
        images_nHWC = torch.empty((len(samples_n), *images[0].shape[1:]), dtype=torch.uint8, pin_memory=on_gpu)
        np.concatenate(images, out=images_nHWC.numpy())
        host_indices_n = torch.from_numpy(samples_n).pin_memory() if on_gpu else torch.from_numpy(samples_n)
        images_nCHW = images_nHWC.to(device, non_blocking=True).permute(0, 3, 1, 2)
        indices_n = host_indices_n.to(device, non_blocking=True)
        with torch.no_grad():
            if epoch is None:
                prepared_nCHW = pixels(images_nCHW)
            else:
                batch = DeviceBatch(images_nCHW, torch.zeros_like(indices_n), indices_n, host_indices_n, epoch)
                prepared_nCHW = prepare(batch).images_BCHW
        with precision():
            outputs = teacher(prepared_nCHW, len(samples_n))[ROWS]
        return row_format.to_host(samples_n, row_format.encode(outputs))

    return launch
