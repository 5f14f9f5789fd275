"""The teacher network in a service: augmentation, precision and model as in a worker, for images that workers send.

Shapes: n images, H=W=data.image_size pixels, C=3 channels, K classes.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainables.config import TrainConfig
from trainables.device.augment import build_train_inputs
from trainables.device.device_batches import DeviceBatch
from trainables.device.model_input import autocast
from trainables.device.precision import with_precision
from trainables.distributed.group import Group
from trainables.teachers.build import logits_network

_METHOD = "service"


class ServedNetwork:
    """See `trainables.teachers.service.actor.Network`."""

    def __init__(self, config: TrainConfig, classes: Sequence[str], device: torch.device) -> None:
        """`config` is a worker's. Raises CheckpointError, ModelError: the teacher cannot be loaded."""
        config = with_precision(config, Group(device=device))
        self._device = device
        self._teacher = logits_network(config, device, classes, [_METHOD])
        self._prepare = build_train_inputs(config, device)
        self._autocast = autocast(config.precision, device)

    def launch(self, images: Sequence[NDArray[np.uint8]], samples_n: NDArray[np.int64], epoch: int) -> Callable[[], NDArray[Any]]:
        on_gpu = self._device.type == "cuda"
        images_nHWC = torch.empty((len(samples_n), *images[0].shape[1:]), dtype=torch.uint8, pin_memory=on_gpu)
        np.concatenate(images, out=images_nHWC.numpy())
        if not on_gpu:
            logits_nK = self._forward(images_nHWC, torch.from_numpy(samples_n), epoch)
            return logits_nK.numpy
        # Pinned: a copy from other memory would wait for all work that the GPU has queued.
        host_indices_n = torch.from_numpy(samples_n).pin_memory()
        logits_nK = self._forward(images_nHWC.to(self._device, non_blocking=True), host_indices_n, epoch)
        host_logits_nK = torch.empty(logits_nK.shape, dtype=logits_nK.dtype, pin_memory=True)
        host_logits_nK.copy_(logits_nK, non_blocking=True)
        copied = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        copied.record(torch.cuda.current_stream(logits_nK.device))  # type: ignore[no-untyped-call]

        def wait() -> NDArray[Any]:
            copied.synchronize()  # type: ignore[no-untyped-call]
            logits: NDArray[Any] = host_logits_nK.numpy()
            return logits

        return wait

    def _forward(self, images_nHWC: Tensor, host_indices_n: Tensor, epoch: int) -> Tensor:
        indices_n = host_indices_n.to(self._device, non_blocking=True)
        batch = DeviceBatch(images_nHWC.permute(0, 3, 1, 2), torch.zeros_like(indices_n), indices_n, host_indices_n, epoch)
        with torch.no_grad():
            prepared_nCHW = self._prepare(batch).images_BCHW
        with self._autocast():
            return self._teacher(prepared_nCHW, len(host_indices_n))[_METHOD].logits_BK
