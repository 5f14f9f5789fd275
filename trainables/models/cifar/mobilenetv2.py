"""MobileNetV2 for CIFAR: Sandler et al. 2018, table 2, at half width, as in RepDistiller (Tian et al. 2020).

Unlike in the paper, the row of 24 channels has stride 1, so that 32-pixel images have maps of 16 pixels after the stem, then 16,
8, 4 and 2; the first row also has an expansion convolution, with a factor of 1; ReLU replaces ReLU6; widths are halved without
rounding to multiples of 8; and there is no dropout.

Stages end where RepDistiller taps: with the table's second row (stage 1), third (2), fifth (3) and seventh (4). A bottleneck's
output is linear, so no activation ends a stage.

Shapes: B batch, C channels, H W pixels, K classes.
"""

from functools import partial
from typing import ClassVar

import torch
from torch import nn

from trainables.models.layers import init_convolutions, stage
from trainables.models.libraries.interface import DeclaredTaps


class InvertedResidual(nn.Module):
    """1×1 expansion, 3×3 depthwise, linear 1×1 projection; plus the input if the shape is unchanged."""

    def __init__(self, channels_in: int, channels_out: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = channels_in * expansion
        self.adds = stride == 1 and channels_in == channels_out
        self.conv = nn.Sequential(
            nn.Conv2d(channels_in, hidden, 1, bias=False),
            nn.BatchNorm2d(hidden),
            nn.ReLU(),
            nn.Conv2d(hidden, hidden, 3, stride=stride, padding=1, groups=hidden, bias=False),
            nn.BatchNorm2d(hidden),
            nn.ReLU(),
            nn.Conv2d(hidden, channels_out, 1, bias=False),
            nn.BatchNorm2d(channels_out),
        )

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        out_BCHW: torch.Tensor = self.conv(x_BCHW)
        return x_BCHW + out_BCHW if self.adds else out_BCHW


class CifarMobileNetV2(nn.Sequential):
    """MobileNetV2 with `width` times the paper's channels, expansion 6; the last convolution keeps 1280."""

    declared_taps = DeclaredTaps("stem", ("layer1", "layer2", "layer3", "layer4"), "avgpool:in")
    PUBLISHED_NAMES: ClassVar[dict[str, str]] = {
        "conv1.": "stem.",
        "blocks.0.": "layer1.0.",
        "blocks.1.": "layer1.1.",
        "blocks.2.": "layer2.0.",
        "blocks.3.": "layer3.0.",
        "blocks.4.": "layer3.1.",
        "blocks.5.": "layer4.0.",
        "blocks.6.": "layer4.1.",
        "conv2.": "head.",
        "classifier.0.": "classifier.",
    }
    """Name parts in RepDistiller's and mdistiller's files → this model's."""

    def __init__(self, num_classes: int, image_size: int = 32, *, width: float) -> None:
        super().__init__()
        stem, *rows = (int(channels * width) for channels in (32, 16, 24, 32, 64, 96, 160, 320))
        self.stem = nn.Sequential(nn.Conv2d(3, stem, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(stem), nn.ReLU())
        row = partial(stage, partial(InvertedResidual, expansion=6))
        first = stage(partial(InvertedResidual, expansion=1), stem, rows[0], 1, stride=1)
        self.layer1 = nn.Sequential(first, row(rows[0], rows[1], 2, stride=1))
        self.layer2 = nn.Sequential(row(rows[1], rows[2], 3, stride=2))
        self.layer3 = nn.Sequential(row(rows[2], rows[3], 4, stride=2), row(rows[3], rows[4], 3, stride=1))
        self.layer4 = nn.Sequential(row(rows[4], rows[5], 3, stride=2), row(rows[5], rows[6], 1, stride=1))
        self.head = nn.Sequential(nn.Conv2d(rows[6], 1280, 1, bias=False), nn.BatchNorm2d(1280), nn.ReLU())
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.classifier = nn.Linear(1280, num_classes)
        init_convolutions(self)
        nn.init.normal_(self.classifier.weight, std=0.01)
        nn.init.zeros_(self.classifier.bias)
