"""The teacher as a worker would run it, for images that come from elsewhere: the same augmentation, precision and model.

Shapes: n images, H=W=data.image_size pixels, C=3 channels, K classes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainables.config import TrainConfig
from trainables.device.augment import TrainInputs
from trainables.device.device_batches import DeviceBatch
from trainables.device.model_input import autocast, normalizer
from trainables.distributed.group import Group
from trainables.engine.modules import numbers, running_teacher

_ASKER = "service"


class LiveNetwork:
    """See `trainables.teachers.service.compute_thread.Network`."""

    def __init__(self, config: TrainConfig, classes: Sequence[str], device: torch.device) -> None:
        """`config` is a worker's. Raises CheckpointError, ModelError: the teacher cannot be loaded."""
        dtype, layout = numbers(config)
        data = config.data
        self.num_classes, self.dtype = len(classes), np.dtype("float64" if dtype == torch.float64 else "float32")
        self._device = device
        self._teacher = running_teacher(config, Group(device=device), classes, [_ASKER])
        normalize = normalizer(data.mean, data.std, device, dtype, layout)
        self._prepare = TrainInputs(data.device_augment, normalize, seed=config.seed, image_size=data.image_size, device=device)
        self._autocast = autocast(config.precision, device)

    def begin(self, images: Sequence[NDArray[np.uint8]], samples_n: NDArray[np.int64], epoch: int) -> Callable[[], NDArray[Any]]:
        """See `Network`."""
        on_gpu = self._device.type == "cuda"
        host_nHWC = torch.empty((len(samples_n), *images[0].shape[1:]), dtype=torch.uint8, pin_memory=on_gpu)
        np.concatenate(images, out=host_nHWC.numpy())
        if not on_gpu:
            return lambda: self._run(host_nHWC, torch.from_numpy(samples_n), epoch).numpy()
        known_n = torch.from_numpy(samples_n).pin_memory()  # a copy from other memory would wait for all that the GPU has to do
        logits_nK = self._run(host_nHWC.to(self._device, non_blocking=True), known_n, epoch)
        answer_nK = torch.empty(logits_nK.shape, dtype=logits_nK.dtype, pin_memory=True).copy_(logits_nK, non_blocking=True)
        computed = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        computed.record()  # type: ignore[no-untyped-call]

        def wait() -> NDArray[Any]:
            computed.synchronize()  # type: ignore[no-untyped-call]
            found: NDArray[Any] = answer_nK.numpy()
            return found

        return wait

    def _run(self, images_nHWC: Tensor, known_n: Tensor, epoch: int) -> Tensor:
        indices_n = known_n.to(self._device, non_blocking=True)
        batch = DeviceBatch(images_nHWC.permute(0, 3, 1, 2), torch.zeros_like(indices_n), indices_n, known_n, epoch)
        with torch.no_grad():
            images_nCHW = self._prepare(batch).images_BCHW
        with self._autocast():
            return self._teacher(images_nCHW, len(known_n))[_ASKER].logits_BK
