"""The operations of AutoAugment, RandAugment and their kin on a batch, as torchvision has them (nearest pixel, black outside).

Every image has its own operation, but the batch is one and nothing may wait for the GPU. So an operation is one of four
passes over the whole batch: a warp (shears, translations, rotation), a table of 256 levels (brightness, contrast, posterize,
solarize, autocontrast, equalize, invert), a blend with gray (color) or with a blur (sharpness). Images that have something else
pass through it unchanged, bit for bit.

The same pixels as torchvision.transforms.v2 on uint8 tensors, but where a rounding differs: one level, or at a warp's tie the
neighbouring pixel.
Shapes: B images, C=3 channels, H W pixels, K kinds (operation, sign, bin), L=256 levels. `pixels_BCHW` as in `color`.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from trainables.device.color import WHITE, blend, column, gray, mean_level


class Space(NamedTuple):
    """How far the operations of a policy go: from nothing in the first of its bins to these magnitudes in the last."""

    bins: int
    shear: float
    translate: float  # part of the image; above 1: pixels
    rotate: float  # degrees
    enhance: float  # brightness, color, contrast and sharpness have the factor 1 ± this
    posterize: tuple[
        int, int, float
    ]  # bits of the first bin, by how many they fall, and what is added before cutting to whole ones
    solarize: float = WHITE  # threshold of the first bin; the last one's is 0


SPACES = {
    "randaugment": Space(31, 0.3, 150 / 331, 30.0, 0.9, (8, 4, 0.5)),
    "randaugment_timm": Space(101, 0.3, 0.45, 30.0, 0.9, (4, 4, 0.0), WHITE + 1),
    "autoaugment": Space(10, 0.3, 150 / 331, 30.0, 0.9, (8, 4, 0.5)),
    "trivialaugment": Space(31, 0.99, 32.0, 135.0, 0.99, (8, 6, 0.5)),
    "augmix": Space(10, 0.3, 1 / 3, 30.0, 0.9, (4, 4, 0.5)),
}
"""Policy → its space: torchvision's, and timm's `rand-…-inc1`, whose magnitudes 0 to 10 are cut to tenths."""
_SIGNED = ("shear_x", "shear_y", "translate_x", "translate_y", "rotate", "brightness", "color", "contrast", "sharpness")
OPERATIONS = ("identity", *_SIGNED, "posterize", "solarize", "autocontrast", "equalize", "invert", "solarize_add")


class Operations:
    """One operation on each image of a batch, by its kind; kind 0 leaves an image as it is."""

    def __init__(self, space: Space, image_size: int, device: torch.device) -> None:
        self._bins, self._device = space.bins, device
        self.named = [
            (name, -amount if minus and name in _SIGNED else amount)
            for name in OPERATIONS
            for minus in (False, True)
            for amount in amounts(name, space, image_size)
        ]
        """The operation and the amount of each kind."""
        self._warps_K6 = torch.tensor([warp(*kind, image_size) for kind in self.named], dtype=torch.float64).to(device)
        self._levels_KL = torch.stack([levels(*kind) for kind in self.named]).float().to(device)
        blends = ("contrast", "color", "sharpness")
        factors = [[1 + amount if name == own else 1.0 for own in blends] for name, amount in self.named]
        self._factors_K3 = torch.tensor(factors, dtype=torch.float64).to(device)

    def kinds(self, operation_B: Tensor, bin_B: Tensor | int, sign_B: Tensor) -> Tensor:
        """The kinds (B,) of operations by their numbers in OPERATIONS, with the sign minus where `sign_B` is below 0.5."""
        return (2 * operation_B + (sign_B < 0.5)) * self._bins + bin_B

    def numbers(self, names: tuple[str, ...]) -> Tensor:
        """Their numbers in OPERATIONS, on the device."""
        return torch.tensor([OPERATIONS.index(name) for name in names]).to(self._device)

    def __call__(self, pixels_BCHW: Tensor, kinds_B: Tensor) -> Tensor:
        """The images, each changed by its kind."""
        contrast_B, color_B, sharpness_B = self._factors_K3[kinds_B].unbind(1)
        operation_B = kinds_B // (2 * self._bins)
        pixels_BCHW = warped(pixels_BCHW, self._warps_K6[kinds_B])
        tables_BCL = leveled(pixels_BCHW, operation_B, self._levels_KL[kinds_B].to(pixels_BCHW.dtype), contrast_B)
        pixels_BCHW = tables_BCL.gather(2, pixels_BCHW.flatten(2).long()).view_as(pixels_BCHW)
        pixels_BCHW = blend(pixels_BCHW, gray(pixels_BCHW), column(color_B))
        return sharpened(pixels_BCHW, sharpness_B)


def amounts(name: str, space: Space, image_size: int) -> list[float]:
    """An operation's magnitude in each bin, in its own unit; 0 for those that have none. torchvision's are float32."""
    if name == "posterize":
        bits, fall, half = space.posterize
        return [bits - math.floor(fall * at / (space.bins - 1) + half) for at in range(space.bins)]
    if name == "solarize":
        return [space.solarize * at for at in torch.linspace(1.0, 0.0, space.bins).tolist()]
    if name == "solarize_add":
        return [float(110 * at // (space.bins - 1)) for at in range(space.bins)]
    shift = space.translate if space.translate > 1 else space.translate * image_size
    kind = name.partition("_")[0]
    last = {"shear": space.shear, "translate": shift, "rotate": space.rotate}.get(kind, space.enhance * (name in _SIGNED))
    return torch.linspace(0.0, last, space.bins).tolist()


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


def levels(name: str, amount: float) -> Tensor:
    """The new level of each level 0 … 255, for operations that do not look at the image; the others leave it as it is."""
    before_L = torch.arange(256)
    if name == "brightness":
        return before_L.mul(1 + amount).clamp(0, WHITE).floor()
    if name == "posterize":
        return before_L & ~((1 << (8 - int(amount))) - 1)
    if name in ("solarize", "invert"):  # whose amount is 0
        return torch.where(before_L >= amount, 255 - before_L, before_L)
    if name == "solarize_add":
        return torch.where(before_L < 128, (before_L + amount).clamp(max=WHITE), before_L)
    return before_L


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
