"""Wide ResNets for CIFAR: Zagoruyko and Komodakis 2016, "Wide Residual Networks", table 1, without dropout.

`wrn_D_K`: depth D = 6n + 4, a 3×3 stem of 16 channels, three stages of n pre-activation blocks on maps of 32, 16 and 8 pixels
with 16·K, 32·K and 64·K channels, BatchNorm and ReLU, global average pooling, one linear layer. As in RepDistiller (Tian et al.
2020), a block that changes the number of channels has a 1×1 convolution of the activated input as its shortcut; with K = 1 the
first stage has none.

A block ends with its sum, so a stage's output may be negative; this is the feature that RepDistiller's methods read. Its
pre-activation of a stage is the output of the next BatchNorm, the input of layer2.0.relu1, layer3.0.relu1 and relu. Here it is
tapped in the forward pass. RepDistiller with `preact`, and mdistiller always, run these three norms a second time: in training
their running statistics move by 1 − 0.9² = 0.19 per step, here by 0.1. Outputs in training are the same.

Shapes: B batch, C channels, H W pixels, K classes.
"""

from typing import ClassVar

import torch
from torch import nn

from trainables.models.layers import init_convolutions, stage
from trainables.models.libraries.interface import DeclaredTaps


class PreActivationBlock(nn.Module):
    """x + conv(relu(bn(conv(a)))) with a = relu(bn(x)), or conv1x1(a) instead of x if the shape changes."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.bn1 = nn.BatchNorm2d(channels_in)
        self.relu1 = nn.ReLU()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels_out)
        self.relu2 = nn.ReLU()
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False)
        changes = stride != 1 or channels_in != channels_out
        self.shortcut = nn.Conv2d(channels_in, channels_out, 1, stride=stride, bias=False) if changes else None

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        active_BCHW = self.relu1(self.bn1(x_BCHW))
        out_BCHW: torch.Tensor = self.conv2(self.relu2(self.bn2(self.conv1(active_BCHW))))
        return out_BCHW + (x_BCHW if self.shortcut is None else self.shortcut(active_BCHW))


class CifarWideResNet(nn.Sequential):
    """A wide ResNet with `depth` layers, not counting shortcuts, and stages `widen` times as wide as 16, 32 and 64."""

    declared_taps = DeclaredTaps(
        "conv1", ("layer1", "layer2", "layer3"), "avgpool:in", preacts=("layer2.0.bn1", "layer3.0.bn1", "bn1")
    )
    PUBLISHED_NAMES: ClassVar[dict[str, str]] = {
        "block1.layer.": "layer1.",
        "block2.layer.": "layer2.",
        "block3.layer.": "layer3.",
        ".convShortcut.": ".shortcut.",
    }
    """Name parts in RepDistiller's and mdistiller's files → this model's."""

    def __init__(self, num_classes: int, image_size: int = 32, *, depth: int, widen: int) -> None:
        super().__init__()
        blocks_per_stage, rest = divmod(depth - 4, 6)
        if rest or blocks_per_stage < 1:
            raise ValueError(f"depth {depth} is not 6n + 4 with n ≥ 1")
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.layer1 = stage(PreActivationBlock, 16, 16 * widen, blocks_per_stage, stride=1)
        self.layer2 = stage(PreActivationBlock, 16 * widen, 32 * widen, blocks_per_stage, stride=2)
        self.layer3 = stage(PreActivationBlock, 32 * widen, 64 * widen, blocks_per_stage, stride=2)
        self.bn1 = nn.BatchNorm2d(64 * widen)
        self.relu = nn.ReLU()
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.fc = nn.Linear(64 * widen, num_classes)
        init_convolutions(self)
        nn.init.zeros_(self.fc.bias)
