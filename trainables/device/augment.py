"""Everything between the bytes on the device and the models: augmentation and mixing. It ends with pixels.

Shapes: B samples of this rank's part of a global batch, C=3 channels, H=W=data.image_size pixels, U random numbers a sample.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from trainables.config import DataConfig, TrainConfig
from trainables.device.color import ColorJitter, Grayscale
from trainables.device.device_batches import DeviceBatch
from trainables.device.erasing import RandomErasing
from trainables.device.mixing import Mixing
from trainables.device.policies import POLICIES
from trainables.device.random_numbers import Draws
from trainables.device.tensor_format import pixels_of


class Augmentation(Protocol):
    """Changes the pixels of a batch, float32 from 0 to 255, by `num_uniforms` random numbers a sample."""

    num_uniforms: int

    def __call__(self, pixels_BCHW: Tensor, uniforms_BU: Tensor) -> Tensor: ...


AUGMENTATIONS: dict[str, Callable[[Any, DataConfig, torch.device], Augmentation]] = {
    "policy": lambda config, data, device: POLICIES[config.name](config, data.image_size, device),
    "color_jitter": lambda config, data, device: ColorJitter(config),
    "grayscale": lambda probability, data, device: Grayscale(probability),
    "random_erasing": lambda probability, data, device: RandomErasing(probability, data.mean, device),
}
"""In torchvision's order; each is made of its value in `data.device_augment`, and draws the random numbers of its name."""


class TrainInputs:
    """Augments and mixes training batches; every random number is a function of (seed, epoch, view, name).

    Augmentations see numbers from 0 to 255, of which `pixels` makes floats in [0, 1]. What models do with these is linear: an
    erased rectangle has the mean color, and MixUp and CutMix mix what is normalized later, as torchvision mixes what is. Nothing
    waits for the device.
    """

    def __init__(self, data: DataConfig, pixels: Callable[[Tensor], Tensor], *, seed: int, device: torch.device) -> None:
        self._pixels, self._seed, config = pixels, seed, data.device_augment
        self._augmentations = {
            name: make(value, data, device) for name, make in AUGMENTATIONS.items() if (value := getattr(config, name))
        }
        self._mixing = Mixing(config.mixup, config.cutmix) if config.mixes else None

    def __call__(self, batch: DeviceBatch) -> DeviceBatch:
        """The batch as the student and the teacher get it. The current stream waits for its copy already."""
        images_BCHW, mix = batch.images_BCHW, None
        if len(batch.labels_B) and (self._augmentations or self._mixing):
            draws = Draws(self._seed, batch.epoch, batch.views_B)
            images_BCHW = images_BCHW.to(torch.float32, memory_format=torch.contiguous_format)
            for name, augmentation in self._augmentations.items():
                images_BCHW = augmentation(images_BCHW, draws.uniforms(name, augmentation.num_uniforms))
            if self._mixing:
                uniforms_BU = draws.uniforms("mixing", self._mixing.num_uniforms)
                images_BCHW, mix = self._mixing(images_BCHW, batch.labels_B, uniforms_BU, batch.host_indices_B)
        batch = batch._replace(images_BCHW=self._pixels(images_BCHW))
        return batch._replace(mix=mix) if mix else batch


def build_train_inputs(config: TrainConfig, device: torch.device) -> TrainInputs:
    """Builds the preprocessing of training batches; the teacher's cache and service use the same."""
    return TrainInputs(config.data, pixels_of(config), seed=config.seed, device=device)
