"""MixUp (Zhang, Cisse, Dauphin and Lopez-Paz 2017) and CutMix (Yun, Han, Oh, Chun, Choe and Yoo 2019), a share for each image.

An image is mixed with its neighbour in the global batch: positions 2i and 2i + 1 are partners. Neighbours are a random pair,
since the order is, and with an even number of samples a worker they are on the same worker for every number of workers: what
an image is mixed with, and how, is a function of (seed, epoch, sample), as are all augmentations. An unreadable image, which
its batch leaves out, shifts the pairs after it on its worker.

Shapes: B images, C=3 channels, H W pixels.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from trainables.device.color import column
from trainables.device.erasing import inside


class Mix(NamedTuple):
    """The second label of a mixed batch's images: cross-entropy is share·CE(own) + (1 - share)·CE(other)."""

    labels_B: Tensor  # int64, of the other image
    share_B: Tensor  # float64 in [0, 1], of the image's own label
    partners_B: Tensor  # int64 on the host, dataset-wide, of the other image


class Mixing:
    """MixUp and CutMix with shares from Beta(α, α); where both are on, each image draws which."""

    num_uniforms = 5

    def __init__(self, mixup_alpha: float, cutmix_alpha: float) -> None:
        self._mixup_alpha, self._cutmix_alpha = mixup_alpha, cutmix_alpha

    def __call__(self, images_BCHW: Tensor, labels_B: Tensor, uniforms_BU: Tensor, host_indices_B: Tensor) -> tuple[Tensor, Mix]:
        """Mix the images of each pair with each other, by `num_uniforms` random numbers a sample."""
        partners_B = partners(len(labels_B), images_BCHW.device)
        partners_BCHW = images_BCHW[partners_B]
        height, width = images_BCHW.shape[2:]
        mixup_share_B, boxes_B4 = self.shares(uniforms_BU, height, width)
        share_B = mixup_share_B
        if self._cutmix_alpha:
            images_BCHW = torch.where(inside(boxes_B4, height, width), partners_BCHW, images_BCHW)
            share_B = mixup_share_B * own_area(boxes_B4, height, width)
        if self._mixup_alpha:
            share = column(mixup_share_B).to(images_BCHW.dtype)
            images_BCHW = partners_BCHW * (1 - share) + images_BCHW * share
        host_partners_B = host_indices_B[partners(len(host_indices_B), host_indices_B.device)]
        return images_BCHW, Mix(labels_B[partners_B], share_B, host_partners_B)

    def shares(self, uniforms_BU: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
        """MixUp's share (B,) of the own pixels, float64, 1 where CutMix was drawn; CutMix's (top, left, bottom, right) of the
        partner's, (B, 4), empty where MixUp was."""
        which_B, share_at_B2, position_B2 = uniforms_BU[:, 0], uniforms_BU[:, 1:3], uniforms_BU[:, 3:]
        mixup_part = 0.5 if self._mixup_alpha and self._cutmix_alpha else float(bool(self._mixup_alpha))
        mixup_B = which_B < mixup_part
        share_B, boxes_B4 = torch.ones_like(which_B), which_B.new_zeros((len(which_B), 4))
        if self._cutmix_alpha:
            boxes_B4 = cut_boxes(symmetric_beta(self._cutmix_alpha, share_at_B2), position_B2, height, width)
            boxes_B4 = boxes_B4.masked_fill(mixup_B[:, None], 0)
        if self._mixup_alpha:
            share_B = symmetric_beta(self._mixup_alpha, share_at_B2).masked_fill(~mixup_B, 1)
        return share_B, boxes_B4


def partners(count: int, device: torch.device) -> Tensor:
    """The row of each row's partner (B,): 1, 0, 3, 2, …; the last of an odd number is its own."""
    return (torch.arange(count, device=device) ^ 1).clamp(max=count - 1)


def symmetric_beta(alpha: float, uniforms_B2: Tensor) -> Tensor:
    """Numbers (B,) of the distribution Beta(α, α) from two uniform ones each, without rejection; float64.

    Student's t with 2α degrees of freedom is T = √(2α(U^(-1/α) - 1))·cos(2πV) (Bailey, "Polar generation of random variates
    with the t-distribution", Mathematics of Computation 1994), and (1 + T/√(2α + T²))/2 is Beta(α, α). Written with U^(1/α),
    so that a small α overflows nothing.
    """
    power_B = uniforms_B2[:, 0] ** (1 / alpha)
    cosine_B = torch.cos(2 * math.pi * uniforms_B2[:, 1])
    return (1 + cosine_B / (power_B / (1 - power_B) + cosine_B**2).sqrt()) / 2


def cut_boxes(share_B: Tensor, position_B2: Tensor, height: int, width: int) -> Tensor:
    """(top, left, bottom, right) of the pasted part, (B, 4), whole numbers: torchvision's CutMix.

    Its sides are √(1 - share) of the image's, its centre is anywhere, and what lies outside the image is lost.
    """
    half_B = 0.5 * (1 - share_B).sqrt()
    half_high_B, half_wide_B = (half_B * height).floor(), (half_B * width).floor()
    y_B, x_B = (position_B2[:, 0] * height).floor(), (position_B2[:, 1] * width).floor()
    edges = [
        (y_B - half_high_B).clamp(min=0),
        (x_B - half_wide_B).clamp(min=0),
        (y_B + half_high_B).clamp(max=height),
        (x_B + half_wide_B).clamp(max=width),
    ]
    return torch.stack(edges, dim=1)


def own_area(boxes_B4: Tensor, height: int, width: int) -> Tensor:
    """The part of each image (B,) outside its box."""
    top_B, left_B, bottom_B, right_B = boxes_B4.unbind(1)
    return 1 - (bottom_B - top_B) * (right_B - left_B) / (height * width)
