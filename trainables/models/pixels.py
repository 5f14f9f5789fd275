"""Make a model prepare its own input from the device pipeline's pixels.

Student and teacher get the same crops (B, 3, H, W) as floats in [0, 1]; each resizes and normalizes them when it is called.

Shapes: B batch, C=3 channels, H W pixels of a crop.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate

from trainables.models.model_input import ModelInput

_TRAIN_SIZE = "_train_image_size"


def take_pixels(model: nn.Module, model_input: ModelInput) -> None:
    """Make `model` accept pixels of any size and prepare them itself in each call.

    Its state dict does not change; the added buffers follow the model's device and dtype.
    """
    device = next(model.parameters()).device
    std_C11 = torch.tensor(model_input.std, dtype=torch.float64).view(-1, 1, 1)
    mean_C11 = torch.tensor(model_input.mean, dtype=torch.float64).view(-1, 1, 1)
    model.register_buffer("_input_scale_C11", (1 / std_C11).to(device), persistent=False)
    model.register_buffer("_input_shift_C11", (-mean_C11 / std_C11).to(device), persistent=False)
    model.register_forward_pre_hook(_InputTransform(model_input.image_size, model_input.interpolation))


def train_at(model: nn.Module, image_size: int | None) -> None:
    """Make `model`, which takes pixels, resize them to `image_size` in training mode; None resets it to its own size."""
    setattr(model, _TRAIN_SIZE, image_size)


@dataclass(frozen=True)
class _InputTransform:
    """A forward pre-hook that converts pixels to the model's input, in at most two operations. See `train_at`."""

    image_size: int
    interpolation: str

    def __call__(self, model: nn.Module, args: tuple[Any, ...]) -> tuple[Tensor]:
        (pixels_BCHW,) = args
        size = getattr(model, _TRAIN_SIZE, None) if model.training else None
        if pixels_BCHW.shape[-1] != (size := size or self.image_size):
            pixels_BCHW = interpolate(pixels_BCHW, (size, size), mode=self.interpolation, align_corners=False, antialias=True)
        scale_C11, shift_C11 = model.get_buffer("_input_scale_C11"), model.get_buffer("_input_shift_C11")
        dtype = pixels_BCHW.dtype
        return (torch.addcmul(shift_C11.to(dtype), pixels_BCHW, scale_C11.to(dtype)),)
