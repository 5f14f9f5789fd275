"""ShuffleNets for CIFAR: Zhang et al. 2017 (V1, table 1, 3 groups, 1×) and Ma et al. 2018 (V2, table 5, 1×).

As in RepDistiller (Tian et al. 2020), with its parameter names. Unlike in the papers, the stem is 1×1 without stride, and there
is no max-pool, so that the three stages of 32-pixel images have maps of 16, 8 and 4 pixels; in V1 a ReLU follows the depthwise
convolution.

Every activation is a separate module and not in place; the input of a stage's last activation is RepDistiller's pre-activation.
Shapes: B batch, C channels, H W pixels, K classes.
"""

import torch
from torch import nn

from trainables.models.layers import stage
from trainables.models.libraries.interface import DeclaredTaps

STEM = 24


def shuffled(x_BCHW: torch.Tensor, groups: int) -> torch.Tensor:
    """Shuffle channels: channel i of group g becomes channel i·groups + g (Zhang et al. 2017, section 3.1)."""
    shuffled_BCHW: torch.Tensor = x_BCHW.unflatten(1, (groups, -1)).transpose(1, 2).flatten(1, 2)
    return shuffled_BCHW


def _pointwise(channels_in: int, channels_out: int, groups: int = 1) -> nn.Conv2d:
    return nn.Conv2d(channels_in, channels_out, 1, groups=groups, bias=False)


def _depthwise(channels: int, stride: int) -> nn.Conv2d:
    return nn.Conv2d(channels, channels, 3, stride=stride, padding=1, groups=channels, bias=False)


class UnitV1(nn.Module):
    """Figure 2 of Zhang et al.: the input is added, or with stride 2 averaged over 3×3 and concatenated.

    `channels_out` counts both parts. The first convolution of the first unit is not grouped (their section 3.2).
    """

    def __init__(self, channels_in: int, channels_out: int, stride: int, groups: int = 3) -> None:
        super().__init__()
        branch_channels = channels_out - channels_in if stride == 2 else channels_out
        hidden = branch_channels // 4
        self.groups = 1 if channels_in == STEM else groups
        self.conv1 = _pointwise(channels_in, hidden, self.groups)
        self.bn1 = nn.BatchNorm2d(hidden)
        self.relu1 = nn.ReLU()
        self.conv2 = _depthwise(hidden, stride)
        self.bn2 = nn.BatchNorm2d(hidden)
        self.relu2 = nn.ReLU()
        self.conv3 = _pointwise(hidden, branch_channels, groups)
        self.bn3 = nn.BatchNorm2d(branch_channels)
        self.relu3 = nn.ReLU()
        self.shortcut = nn.AvgPool2d(3, stride=2, padding=1) if stride == 2 else None

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        out_BCHW = shuffled(self.relu1(self.bn1(self.conv1(x_BCHW))), self.groups)
        out_BCHW = self.bn3(self.conv3(self.relu2(self.bn2(self.conv2(out_BCHW)))))
        joined_BCHW = out_BCHW + x_BCHW if self.shortcut is None else torch.cat((out_BCHW, self.shortcut(x_BCHW)), 1)
        activated_BCHW: torch.Tensor = self.relu3(joined_BCHW)
        return activated_BCHW


class DownUnitV2(nn.Module):
    """Figure 3d of Ma et al.: two branches of stride 2, each with half of the output."""

    def __init__(self, channels_in: int, channels_out: int) -> None:
        super().__init__()
        half = channels_out // 2
        self.conv1 = _depthwise(channels_in, stride=2)
        self.bn1 = nn.BatchNorm2d(channels_in)
        self.conv2 = _pointwise(channels_in, half)
        self.bn2 = nn.BatchNorm2d(half)
        self.conv3 = _pointwise(channels_in, half)
        self.bn3 = nn.BatchNorm2d(half)
        self.relu3 = nn.ReLU()
        self.conv4 = _depthwise(half, stride=2)
        self.bn4 = nn.BatchNorm2d(half)
        self.conv5 = _pointwise(half, half)
        self.bn5 = nn.BatchNorm2d(half)
        self.relu = nn.ReLU()

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        left_BCHW = self.bn2(self.conv2(self.bn1(self.conv1(x_BCHW))))
        right_BCHW = self.bn4(self.conv4(self.relu3(self.bn3(self.conv3(x_BCHW)))))
        right_BCHW = self.bn5(self.conv5(right_BCHW))
        return shuffled(self.relu(torch.cat((left_BCHW, right_BCHW), 1)), 2)


class UnitV2(nn.Module):
    """Figure 3c of Ma et al.: half of the channels pass unchanged, the others are convolved.

    The ReLU follows the concatenation, while RepDistiller's precedes it. The unchanged half already comes from a ReLU, so another
    one changes neither it nor its gradient, and the input of this ReLU is RepDistiller's pre-activation.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        half = channels // 2
        self.conv1 = _pointwise(half, half)
        self.bn1 = nn.BatchNorm2d(half)
        self.relu1 = nn.ReLU()
        self.conv2 = _depthwise(half, stride=1)
        self.bn2 = nn.BatchNorm2d(half)
        self.conv3 = _pointwise(half, half)
        self.bn3 = nn.BatchNorm2d(half)
        self.relu = nn.ReLU()

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        passed_BCHW, taken_BCHW = x_BCHW.chunk(2, 1)
        out_BCHW = self.bn2(self.conv2(self.relu1(self.bn1(self.conv1(taken_BCHW)))))
        out_BCHW = self.bn3(self.conv3(out_BCHW))
        return shuffled(self.relu(torch.cat((passed_BCHW, out_BCHW), 1)), 2)


class CifarShuffleNetV1(nn.Sequential):
    """Stages of 4, 8 and 4 units with 240, 480 and 960 channels. Initial parameters are torch's own, as in RepDistiller."""

    declared_taps = DeclaredTaps("relu", ("layer1", "layer2", "layer3"), "avgpool:in")

    def __init__(self, num_classes: int, image_size: int = 32) -> None:
        super().__init__()
        self.conv1 = _pointwise(3, STEM)
        self.bn1 = nn.BatchNorm2d(STEM)
        self.relu = nn.ReLU()
        self.layer1 = stage(UnitV1, STEM, 240, 4, stride=2)
        self.layer2 = stage(UnitV1, 240, 480, 8, stride=2)
        self.layer3 = stage(UnitV1, 480, 960, 4, stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.linear = nn.Linear(960, num_classes)


class CifarShuffleNetV2(nn.Sequential):
    """Stages of 4, 8 and 4 units with 116, 232 and 464 channels, and a 1×1 convolution to 1024."""

    declared_taps = DeclaredTaps("relu1", ("layer1", "layer2", "layer3"), "avgpool:in")

    def __init__(self, num_classes: int, image_size: int = 32) -> None:
        super().__init__()
        self.conv1 = _pointwise(3, STEM)
        self.bn1 = nn.BatchNorm2d(STEM)
        self.relu1 = nn.ReLU()
        self.layer1 = self._stage(STEM, 116, 4)
        self.layer2 = self._stage(116, 232, 8)
        self.layer3 = self._stage(232, 464, 4)
        self.conv2 = _pointwise(464, 1024)
        self.bn2 = nn.BatchNorm2d(1024)
        self.relu2 = nn.ReLU()
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.linear = nn.Linear(1024, num_classes)

    @staticmethod
    def _stage(channels_in: int, channels_out: int, num_units: int) -> nn.Sequential:
        return nn.Sequential(DownUnitV2(channels_in, channels_out), *(UnitV2(channels_out) for _ in range(num_units - 1)))
