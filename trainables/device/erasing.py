"""Random erasing: Zhong, Zheng, Kang, Li and Yang 2017, with the ranges of torchvision's RandomErasing.

Shapes: B images, C=3 channels, H W pixels, T tries.
"""

import math

import torch
from torch import Tensor

from trainables.device.color import WHITE, column

_TRIES = 10
_AREA = (0.02, 0.33)
_LOG_RATIO = (math.log(0.3), math.log(3.3))


class RandomErasing:
    """Gives a random rectangle of some of the images the mean color (`mean` is of pixels in [0, 1])."""

    num_uniforms = 3 + 2 * _TRIES

    def __init__(self, probability: float, mean: tuple[float, float, float], device: torch.device) -> None:
        self._probability = probability
        self._fill_C11 = (torch.tensor(mean, dtype=torch.float64) * WHITE).to(device, torch.float32)[:, None, None]

    def __call__(self, pixels_BCHW: Tensor, uniforms_BU: Tensor) -> Tensor:
        """See Augmentation."""
        height, width = pixels_BCHW.shape[2:]
        return torch.where(inside(self.boxes(uniforms_BU, height, width), height, width), self._fill_C11, pixels_BCHW)

    def boxes(self, uniforms_BU: Tensor, height: int, width: int) -> Tensor:
        """(top, left, bottom, right) of what is erased, (B, 4), whole numbers; empty where nothing is.

        torchvision's make_params: ten tries at an area (0.02 to 0.33 of the image) and a ratio of height to width (0.3 to
        3.3), and nothing where none of them is smaller than the image.
        """
        (chance_B, down_B, right_B), tries_BU = uniforms_BU[:, :3].unbind(1), uniforms_BU[:, 3:]
        area_BT = height * width * (_AREA[0] + (_AREA[1] - _AREA[0]) * tries_BU[:, 0::2])
        ratio_BT = torch.exp(_LOG_RATIO[0] + (_LOG_RATIO[1] - _LOG_RATIO[0]) * tries_BU[:, 1::2])
        high_BT, wide_BT = (area_BT * ratio_BT).sqrt().round(), (area_BT / ratio_BT).sqrt().round()
        fits_BT = (high_BT < height) & (wide_BT < width)
        first_B1 = fits_BT.byte().argmax(dim=1, keepdim=True)
        erased_B = (chance_B < self._probability) & fits_BT.any(dim=1)
        high_B = high_BT.gather(1, first_B1)[:, 0].masked_fill(~erased_B, 0)
        wide_B = wide_BT.gather(1, first_B1)[:, 0].masked_fill(~erased_B, 0)
        top_B, left_B = (down_B * (height - high_B + 1)).floor(), (right_B * (width - wide_B + 1)).floor()
        return torch.stack([top_B, left_B, top_B + high_B, left_B + wide_B], dim=1)


def inside(boxes_B4: Tensor, height: int, width: int) -> Tensor:
    """The pixels (B, 1, H, W) inside each image's (top, left, bottom, right)."""
    top, left, bottom, right = (column(edge_B) for edge_B in boxes_B4.unbind(1))
    y_H1, x_W = torch.arange(height, device=boxes_B4.device)[:, None], torch.arange(width, device=boxes_B4.device)
    return (y_H1 >= top) & (y_H1 < bottom) & (x_W >= left) & (x_W < right)
