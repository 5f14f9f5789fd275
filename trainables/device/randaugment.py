"""RandAugment: Cubuk, Zoph, Shlens and Le 2020, with torchvision's fourteen operations and magnitudes (31 bins, nearest, black).

Every image draws its own operations, but the batch is one and nothing may wait for the GPU. So an operation is one of four
passes over the whole batch: a warp (shears, translations, rotation), a table of 256 levels (brightness, contrast, posterize,
solarize, autocontrast, equalize), a blend with gray (color) or with a blur (sharpness). Images that drew something else
pass through it unchanged, bit for bit.

The same pixels as torchvision.transforms.v2 on uint8 tensors, but where a rounding differs: one level, or at a warp's tie the
neighbouring pixel.
Shapes: B images, C=3 channels, H W pixels, K drawn kinds (operation, sign), L=256 levels. `pixels_BCHW` as in `color`.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from trainables.config import RandAugmentConfig
from trainables.device.color import WHITE, blend, column, gray, mean_level

_BINS = 31
_MAX_MAGNITUDE = {
    "identity": 0.0,
    "shear_x": 0.3,
    "shear_y": 0.3,
    "translate_x": 150 / 331,
    "translate_y": 150 / 331,
    "rotate": 30.0,
    "brightness": 0.9,
    "color": 0.9,
    "contrast": 0.9,
    "sharpness": 0.9,
    "posterize": 0.0,
    "solarize": 0.0,
    "autocontrast": 0.0,
    "equalize": 0.0,
}
"""The magnitude of the last bin, of those that can have either sign, else 0; translations as a part of the image."""
OPERATIONS = tuple(_MAX_MAGNITUDE)


class RandAugment:
    """`config.num_ops` operations on each image, each with the sign and the magnitude that torchvision gives it."""

    def __init__(self, config: RandAugmentConfig, image_size: int, device: torch.device) -> None:
        self.num_uniforms = 2 * config.num_ops
        kinds = [(name, signed(name, sign, config.magnitude, image_size)) for name in OPERATIONS for sign in (1, -1)]

        def table(rows: list[list[float]]) -> Tensor:
            return torch.tensor(rows, dtype=torch.float64).to(device)

        self._warps_K6 = table([warp(name, amount, image_size) for name, amount in kinds])
        self._levels_KL = table([levels(name, amount, config.magnitude) for name, amount in kinds])
        blends = ("contrast", "color", "sharpness")
        self._factors_K3 = table([[1 + amount if name == own else 1.0 for own in blends] for name, amount in kinds])

    def __call__(self, pixels_BCHW: Tensor, uniforms_BU: Tensor) -> Tensor:
        """See Augmentation; two random numbers choose an operation and its sign."""
        for kinds_B in kinds(uniforms_BU):
            pixels_BCHW = self.apply(pixels_BCHW, kinds_B)
        return pixels_BCHW

    def apply(self, pixels_BCHW: Tensor, kinds_B: Tensor) -> Tensor:
        """One operation on each image: kind 2·i is OPERATIONS[i], 2·i + 1 the same with the other sign."""
        contrast_B, color_B, sharpness_B = self._factors_K3[kinds_B].unbind(1)
        operation_B = kinds_B // 2
        pixels_BCHW = warped(pixels_BCHW, self._warps_K6[kinds_B])
        tables_BCL = leveled(pixels_BCHW, operation_B, self._levels_KL[kinds_B].to(pixels_BCHW.dtype), contrast_B)
        pixels_BCHW = tables_BCL.gather(2, pixels_BCHW.flatten(2).long()).view_as(pixels_BCHW)
        pixels_BCHW = blend(pixels_BCHW, gray(pixels_BCHW), column(color_B))
        return sharpened(pixels_BCHW, sharpness_B)


def kinds(uniforms_BU: Tensor) -> list[Tensor]:
    """The kinds (B,) of the operations that two random numbers each choose, see `RandAugment.apply`."""
    return [2 * (operation_B * len(OPERATIONS)).long() + (sign_B < 0.5) for operation_B, sign_B in uniforms_BU.T.split(2)]


def signed(name: str, sign: int, magnitude: int, image_size: int) -> float:
    """An operation's magnitude in its own unit; 0 for those that have none. torchvision's are float32."""
    last = _MAX_MAGNITUDE[name] * (image_size if name.startswith("translate") else 1)
    return sign * float(torch.linspace(0.0, last, _BINS)[magnitude])


def warp(name: str, amount: float, image_size: int) -> list[float]:
    """Where an output pixel comes from: x' = m₀x + m₁y + m₂, y' = m₃x + m₄y + m₅, in pixels from the image's centre."""
    half = image_size / 2
    angle = math.radians(amount)
    matrices = {
        "shear_x": [1.0, amount, amount * half, 0.0, 1.0, 0.0],  # the top row stays, as in the TensorFlow original
        "shear_y": [1.0, 0.0, 0.0, amount, 1.0, amount * half],
        "translate_x": [1.0, 0.0, -float(int(amount)), 0.0, 1.0, 0.0],
        "translate_y": [1.0, 0.0, 0.0, 0.0, 1.0, -float(int(amount))],
        "rotate": [math.cos(angle), -math.sin(angle), 0.0, math.sin(angle), math.cos(angle), 0.0],
    }
    return matrices.get(name, [1.0, 0.0, 0.0, 0.0, 1.0, 0.0])


def warped(pixels_BCHW: Tensor, warps_B6: Tensor) -> Tensor:
    """Each image by its own warp: nearest pixel, black outside."""
    height, width = pixels_BCHW.shape[2:]
    x_W = torch.arange(width, device=pixels_BCHW.device, dtype=pixels_BCHW.dtype) - (width - 1) / 2
    y_H1 = (torch.arange(height, device=pixels_BCHW.device, dtype=pixels_BCHW.dtype) - (height - 1) / 2)[:, None]
    axes = []
    for part_B3, size in zip(warps_B6.to(pixels_BCHW.dtype).tensor_split(2, dim=1), (width, height), strict=True):
        by_x, by_y, shift = (part_B3 / (0.5 * size))[..., None, None].unbind(1)  # grid_sample counts in half images
        axes.append(by_x * x_W + by_y * y_H1 + shift)
    grid_BHW2 = torch.stack(axes, dim=-1)
    return F.grid_sample(pixels_BCHW, grid_BHW2, mode="nearest", padding_mode="zeros", align_corners=False)


def levels(name: str, amount: float, magnitude: int) -> list[float]:
    """The new level of each level 0 … 255, for operations that do not look at the image; the others leave it as it is."""
    before_L = torch.arange(256)
    if name == "brightness":
        return before_L.mul(1 + amount).clamp(0, WHITE).floor().tolist()
    if name == "posterize":
        return (before_L & ~((1 << (8 - posterize_bits(magnitude))) - 1)).tolist()
    if name == "solarize":
        threshold = solarize_threshold(magnitude)
        return torch.where(before_L >= threshold, 255 - before_L, before_L).tolist()
    return before_L.tolist()


def posterize_bits(magnitude: int) -> int:
    """The bits of a level that posterize leaves."""
    return int((8 - torch.arange(_BINS) / ((_BINS - 1) / 4)).round()[magnitude])


def solarize_threshold(magnitude: int) -> float:
    """The level from which on solarize inverts."""
    return WHITE * float(torch.linspace(1.0, 0.0, _BINS)[magnitude])


def leveled(pixels_BCHW: Tensor, operation_B: Tensor, levels_BL: Tensor, contrast_B: Tensor) -> Tensor:
    """The table (B, C, L) of new levels of each image and channel; `levels_BL` where it does not depend on the image."""
    before_L = torch.arange(256, device=pixels_BCHW.device, dtype=pixels_BCHW.dtype)
    mean_B1 = mean_level(gray(pixels_BCHW)).flatten(1)
    contrast_BL = blend(before_L.expand_as(levels_BL), mean_B1, contrast_B[:, None])
    tables_BL = torch.where((operation_B == OPERATIONS.index("contrast"))[:, None], contrast_BL, levels_BL)
    chosen = {name: (operation_B == OPERATIONS.index(name))[:, None, None] for name in ("autocontrast", "equalize")}
    tables_BCL = torch.where(chosen["autocontrast"], autocontrast_table(pixels_BCHW, before_L), tables_BL[:, None])
    return torch.where(chosen["equalize"], equalize_table(pixels_BCHW, before_L), tables_BCL)


def autocontrast_table(pixels_BCHW: Tensor, before_L: Tensor) -> Tensor:
    """Stretches each channel to 0 … 255; one of a single level stays."""
    least_BC1, most_BC1 = pixels_BCHW.amin(dim=(2, 3))[..., None], pixels_BCHW.amax(dim=(2, 3))[..., None]
    flat_BC1 = least_BC1 == most_BC1
    scale_BC1 = ((most_BC1 - least_BC1) * (1 / WHITE)).masked_fill(flat_BC1, 1)
    return ((before_L - least_BC1.masked_fill(flat_BC1, 0)) / scale_BC1).clamp_(0, WHITE).floor_()


def equalize_table(pixels_BCHW: Tensor, before_L: Tensor) -> Tensor:
    """PIL's histogram equalisation of each channel, in whole numbers; a channel with too few pixels off its top level stays."""
    levels_BCP = pixels_BCHW.flatten(2).long()
    counts_BCL = levels_BCP.new_zeros((*levels_BCP.shape[:2], 256), dtype=torch.int32)
    counts_BCL.scatter_add_(2, levels_BCP, counts_BCL.new_ones(1).expand_as(levels_BCP))
    top_BC1 = levels_BCP.amax(dim=2, keepdim=True)
    step_BC1 = (levels_BCP.shape[2] - counts_BCL.gather(2, top_BC1)) // 255
    below_BCL = counts_BCL.cumsum(2) - counts_BCL
    table_BCL = ((below_BCL + step_BC1 // 2) // step_BC1.clamp(min=1)).clamp_(0, 255)
    return torch.where(step_BC1 == 0, before_L, table_BCL.to(before_L.dtype))


def sharpened(pixels_BCHW: Tensor, factor_B: Tensor) -> Tensor:
    """factor·image + (1 - factor)·blur, where the blur weighs a pixel with 5 and its eight neighbours with 1; not at the edge."""
    if min(pixels_BCHW.shape[2:]) <= 2:
        return pixels_BCHW
    inner_BCHW = pixels_BCHW[:, :, 1:-1, 1:-1]
    rows = pixels_BCHW[:, :, :-2] + pixels_BCHW[:, :, 1:-1] + pixels_BCHW[:, :, 2:]
    blur_BCHW = ((rows[..., :-2] + rows[..., 1:-1] + rows[..., 2:] + 4 * inner_BCHW) / 13).round_()
    away = (1 - factor_B).to(pixels_BCHW.dtype)
    output_BCHW = pixels_BCHW.clone()
    output_BCHW[:, :, 1:-1, 1:-1] += (blur_BCHW - inner_BCHW) * column(away)
    return output_BCHW.clamp_(0, WHITE).floor_()
