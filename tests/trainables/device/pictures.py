"""Batches of uint8 images with smooth parts, noise, flat channels and few levels: what augmentations meet."""

import torch
from torch import Tensor


def pictures(count: int, size: int, seed: int = 0) -> Tensor:
    """uint8 images (count, 3, size, size)."""
    draws = torch.Generator().manual_seed(seed)
    coarse = torch.rand((count, 3, 5, 5), generator=draws)
    images = torch.nn.functional.interpolate(coarse, (size, size), mode="bilinear") * 255
    images += 20 * torch.randn(images.shape, generator=draws)
    images = images.clamp(0, 255).to(torch.uint8)
    images[0] = 77  # one level
    images[1, 0] = 0
    images[2] = images[2] // 100 * 100  # few levels, and black
    images[3] = images[3, :1]  # gray
    return images


def levels_apart(ours: Tensor, theirs: Tensor) -> tuple[int, float]:
    """The largest difference of two images, and the part of their values that differ."""
    apart = (ours.double() - theirs.double()).abs()
    return int(apart.max()), float((apart > 0).double().mean())
