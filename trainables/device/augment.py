"""Everything between the bytes on the device and the models: augmentation, normalisation, mixing, in torchvision's order.

Shapes: B samples of this rank's part of a global batch, C=3 channels, H=W=data.image_size pixels.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from trainables.config import DeviceAugmentConfig, TrainConfig
from trainables.device.color import ColorJitter
from trainables.device.device_batches import DeviceBatch
from trainables.device.erasing import RandomErasing
from trainables.device.mixing import Mixing
from trainables.device.model_input import pixels_of
from trainables.device.randaugment import RandAugment
from trainables.device.random_numbers import Draws


class TrainInputs:
    """Augments, normalises and mixes training batches, every random number a function of (seed, epoch, sample, which one).

    On whole numbers 0 … 255: RandAugment, ColorJitter. Then `normalize`; then random erasing and MixUp or CutMix, which on
    normalised images are torchvision's. Nothing waits for the device.
    """

    def __init__(
        self,
        config: DeviceAugmentConfig,
        normalize: Callable[[Tensor], Tensor],
        *,
        seed: int,
        image_size: int,
        device: torch.device,
    ) -> None:
        self._normalize = normalize
        self._seed, self._draws_any = seed, config != DeviceAugmentConfig()
        self._randaugment = RandAugment(config.randaugment, image_size, device) if config.randaugment else None
        self._color_jitter = ColorJitter(config.color_jitter) if config.color_jitter else None
        self._erasing = RandomErasing(config.random_erasing) if config.random_erasing else None
        self._mixing = Mixing(config.mixup, config.cutmix) if config.mixes else None

    def __call__(self, batch: DeviceBatch) -> DeviceBatch:
        """The batch as the student and the teacher get it. The current stream waits for its copy already."""
        if not self._draws_any or not len(batch.labels_B):
            return batch._replace(images_BCHW=self._normalize(batch.images_BCHW))
        draws = Draws(self._seed, batch.epoch, batch.indices_B)
        # What one augmentation draws does not depend on which others are on: each has its own columns, RandAugment the last.
        at_jitter = Mixing.num_uniforms
        at_erasing = at_jitter + ColorJitter.num_uniforms
        at_randaugment = at_erasing + RandomErasing.num_uniforms
        images_BCHW = batch.images_BCHW
        if self._randaugment or self._color_jitter:
            images_BCHW = images_BCHW.to(torch.float32, memory_format=torch.contiguous_format)
        if self._randaugment:
            images_BCHW = self._randaugment(images_BCHW, draws, at_randaugment)
        if self._color_jitter:
            images_BCHW = self._color_jitter(images_BCHW, draws, at_jitter)
        images_BCHW = self._normalize(images_BCHW)
        if self._erasing:
            images_BCHW = self._erasing(images_BCHW, draws, at_erasing)
        if self._mixing is None:
            return batch._replace(images_BCHW=images_BCHW)
        images_BCHW, mix = self._mixing(images_BCHW, batch.labels_B, draws, 0)
        return batch._replace(images_BCHW=images_BCHW, mix=mix)


def build_train_inputs(config: TrainConfig, device: torch.device) -> TrainInputs:
    """Builds the preprocessing of training batches; the teacher's cache and service use the same."""
    data = config.data
    return TrainInputs(data.device_augment, pixels_of(config), seed=config.seed, image_size=data.image_size, device=device)
