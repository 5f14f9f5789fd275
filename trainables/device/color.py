"""Brightness, contrast, saturation and hue of each image of a batch, with factors of its own, and ColorJitter made of them.

The same pixels as torchvision.transforms.v2 on uint8 tensors, one level apart where a rounding differs.
Shapes: B images, C=3 channels, H W pixels. `pixels_BCHW` are float32 of whole numbers 0 … 255, before and after each function.
"""

import torch
from torch import Tensor

from trainables.config import ColorJitterConfig

WHITE = 255.0
_GRAY = (0.2989, 0.587, 0.114)
_BRIGHTNESS, _CONTRAST = 0, 1  # columns of ColorJitter's factors; saturation and hue follow


def column(values_B: Tensor) -> Tensor:
    """(B,) as (B, 1, 1, 1)."""
    return values_B[:, None, None, None]


def gray(pixels_BCHW: Tensor) -> Tensor:
    """Luminance in whole numbers, (B, 1, H, W)."""
    red, green, blue = pixels_BCHW.unbind(1)
    return (red * _GRAY[0]).add_(green, alpha=_GRAY[1]).add_(blue, alpha=_GRAY[2]).floor_().unsqueeze(1)


def mean_level(gray_B1HW: Tensor) -> Tensor:
    """The mean of whole numbers, (B, 1, 1, 1). Summed exactly, so that it does not depend on what else is in the batch."""
    return gray_B1HW.mean(dim=(1, 2, 3), keepdim=True, dtype=torch.float64).to(gray_B1HW.dtype)


def blend(pixels: Tensor, other: Tensor, factor: Tensor) -> Tensor:
    """factor·pixels + (1 - factor)·other, cut to [0, 255] and to whole numbers. Factor (float64) 1 changes nothing."""
    scaled = pixels * factor.to(pixels.dtype)
    return scaled.addcmul_(other, (1 - factor).to(pixels.dtype)).clamp_(0, WHITE).floor_()


def shift_hue(pixels_BCHW: Tensor, hue_shift_B: Tensor) -> Tensor:
    """Turn every color by a part of the color circle, -0.5 to 0.5: to HSV (as PIL defines it) and back."""
    red, green, blue = (pixels_BCHW * (1 / WHITE)).unbind(1)
    least, most = torch.aminmax(torch.stack((red, green, blue)), dim=0)
    spread = most - least
    flat = spread == 0
    divisor = spread.masked_fill(flat, 1)
    saturation = spread / most.masked_fill(flat, 1)
    of_red, of_green, of_blue = ((most - part) / divisor for part in (red, green, blue))
    sixths = torch.where(most == red, of_blue - of_green, torch.where(most == green, 2 + of_red - of_blue, 4 + of_green - of_red))
    hue = ((sixths / 6 + 1).fmod(1) + hue_shift_B.to(sixths.dtype)[:, None, None]).remainder(1)
    parts = []
    for channel_offset in (5, 3, 1):  # red, green and blue lie a third of the circle apart
        distance = (hue * 6 + channel_offset).remainder(6)
        parts.append(most - most * saturation * torch.minimum(distance, 4 - distance).clamp(0, 1))
    # from [0, 1] to whole numbers as torchvision does: 1 becomes 255, and each level has the same share of the range
    return torch.stack(parts, dim=1).clamp_(0, 1).mul_(WHITE + 1 - 1e-3).floor_()


class ColorJitter:
    """torchvision's ColorJitter: brightness, contrast, saturation and hue in an order that each image draws for itself."""

    num_uniforms = 9

    def __init__(self, config: ColorJitterConfig) -> None:
        self._config = config

    def __call__(self, pixels_BCHW: Tensor, uniforms_BU: Tensor) -> Tensor:
        """See Augmentation."""
        factors_B4, order_B4, changed_B = self.factors(uniforms_BU)
        changed_BCHW = jitter(pixels_BCHW, factors_B4, order_B4, hue=self._config.hue > 0)
        if self._config.probability == 1:
            return changed_BCHW
        return torch.where(column(changed_B), changed_BCHW, pixels_BCHW)

    def factors(self, uniforms_BU: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Brightness, contrast, saturation and hue (B, 4), by what they are sorted, and which images are changed (B,)."""
        order_B4, at_B4, changed_B1 = uniforms_BU.tensor_split((4, 8), dim=1)
        config = self._config
        ranges = [(max(0.0, 1 - width), 1 + width) for width in (config.brightness, config.contrast, config.saturation)]
        ranges.append((-config.hue, config.hue))
        factors_B4 = torch.stack([low + (high - low) * at_B4[:, factor] for factor, (low, high) in enumerate(ranges)], dim=1)
        return factors_B4, order_B4, changed_B1[:, 0] < config.probability


class Grayscale:
    """torchvision's RandomGrayscale: an image has the luminance in all channels with a probability."""

    num_uniforms = 1

    def __init__(self, probability: float) -> None:
        self._probability = probability

    def __call__(self, pixels_BCHW: Tensor, uniforms_BU: Tensor) -> Tensor:
        """See Augmentation."""
        return torch.where(column(uniforms_BU[:, 0] < self._probability), gray(pixels_BCHW), pixels_BCHW)


def jitter(pixels_BCHW: Tensor, factors_B4: Tensor, order_B4: Tensor, hue: bool) -> Tensor:
    """Brightness, contrast, saturation and (if `hue`) hue by these factors, those with a smaller `order_B4` first.

    Each image has its own order, but the batch is one: three blends come before the hue and three after it, and in each image
    those that are on the wrong side of its hue have the factor 1.
    """
    blends_B3 = order_B4[:, :3].argsort(dim=1)
    if not hue:
        return _blends(pixels_BCHW, factors_B4, blends_B3, torch.ones_like(blends_B3, dtype=torch.bool))
    before_B3 = order_B4.gather(1, blends_B3) < order_B4[:, 3:]
    pixels_BCHW = _blends(pixels_BCHW, factors_B4, blends_B3, before_B3)
    pixels_BCHW = shift_hue(pixels_BCHW, factors_B4[:, 3])
    return _blends(pixels_BCHW, factors_B4, blends_B3, ~before_B3)


def _blends(pixels_BCHW: Tensor, factors_B4: Tensor, blends_B3: Tensor, active_B3: Tensor) -> Tensor:
    """Brightness, contrast and saturation in the order of `blends_B3`, where active."""
    factors_B3 = factors_B4.gather(1, blends_B3).masked_fill(~active_B3, 1)
    for blend_B, factor_B in zip(blends_B3.unbind(1), factors_B3.unbind(1), strict=True):
        gray_B1HW = gray(pixels_BCHW)
        other = torch.where(column(blend_B == _CONTRAST), mean_level(gray_B1HW), gray_B1HW)
        other = other.masked_fill(column(blend_B == _BRIGHTNESS), 0)
        pixels_BCHW = blend(pixels_BCHW, other, column(factor_B))
    return pixels_BCHW
