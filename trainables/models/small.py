"""Small classifiers for 8×8 and 32×32 images, to make real runs on a CPU feasible.

Shapes: B batch, C channels, H W pixels, K classes.
"""

import math
from itertools import pairwise

import torch
from torch import nn

from trainables.models.layers import init_convolutions
from trainables.models.libraries.interface import DeclaredTaps


class ConvNet(nn.Sequential):
    """Stages of 3×3 convolution, BatchNorm and ReLU. The map is halved between stages and averaged at the end.

    It accepts any image size of at least 2^(stages - 1) pixels.
    """

    def __init__(self, num_classes: int, image_size: int = 8, *, widths: tuple[int, ...], convs_per_stage: int) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        ends: list[int] = []
        channels = 3
        for stage, width in enumerate(widths):
            if stage > 0:
                layers.append(nn.MaxPool2d(2))
            for _ in range(convs_per_stage):
                layers += [nn.Conv2d(channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
                channels = width
            ends.append(len(layers) - 1)
        self.features = nn.Sequential(*layers)
        self.declared_taps = DeclaredTaps("features.2", tuple(f"features.{index}" for index in ends), "pool:in")
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.head = nn.Linear(channels, num_classes)
        init_convolutions(self)


class MLP(nn.Module):
    """Hidden ReLU layers on flattened pixels, without batch statistics: a sample's gradient does not depend on its batch."""

    def __init__(self, num_classes: int, image_size: int = 8, *, hidden: tuple[int, ...]) -> None:
        super().__init__()
        sizes = (3 * image_size**2, *hidden)
        self.hidden = nn.ModuleList(nn.Linear(before, after) for before, after in pairwise(sizes))
        self.head = nn.Linear(sizes[-1], num_classes)
        for layer in self.hidden:
            assert isinstance(layer, nn.Linear)
            nn.init.normal_(layer.weight, std=math.sqrt(2 / layer.in_features))
            nn.init.zeros_(layer.bias)

    def forward(self, images_BCHW: torch.Tensor) -> torch.Tensor:
        """Logits (B, K)."""
        features_BD = images_BCHW.flatten(1)
        for layer in self.hidden:
            features_BD = layer(features_BD).relu()
        logits_BK: torch.Tensor = self.head(features_BD)
        return logits_BK
