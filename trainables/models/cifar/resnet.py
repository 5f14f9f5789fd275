"""ResNets for CIFAR: He et al. 2015, "Deep Residual Learning for Image Recognition", section 4.2.

Depth 6n + 2: a 3×3 stem, three stages of n basic blocks on maps of 32, 16 and 8 pixels, global average pooling, one linear layer.
Where a stage changes the shape, the shortcut is a 1×1 convolution with BatchNorm, the paper's option B. The paper's own CIFAR
runs pad with zeros, option A, which has 2,752 parameters less. B is what RepDistiller (Tian et al. 2020) has, whose models the
distillation papers compare: parameter names and shapes are the same as there. The `x4` models are RepDistiller's too: a stem of
32 and stages four times as wide.

Every activation is a module of its own and none is in place, so that what goes into it can be read as well.

Shapes: B batch, C channels, H W pixels, K classes.
"""

from __future__ import annotations

import torch
from torch import nn

NARROW = (16, 16, 32, 64)
WIDE_X4 = (32, 64, 128, 256)


class BasicBlock(nn.Module):
    """relu(bn(conv(relu(bn(conv(x))))) + shortcut(x))."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels_out, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels_out)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(channels_out, channels_out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels_out)
        self.relu2 = nn.ReLU()
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels_out:
            shortcut = nn.Conv2d(channels_in, channels_out, 1, stride=stride, bias=False)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(channels_out))

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        out_BCHW = self.relu1(self.bn1(self.conv1(x_BCHW)))
        out_BCHW = self.bn2(self.conv2(out_BCHW))
        activated_BCHW: torch.Tensor = self.relu2(out_BCHW + self.downsample(x_BCHW))
        return activated_BCHW


class CifarResNet(nn.Module):
    """`depth` weighted layers on the path; `widths`: channels of the stem and of the three stages."""

    def __init__(self, num_classes: int, *, depth: int, widths: tuple[int, int, int, int] = NARROW) -> None:
        super().__init__()
        blocks_per_stage, rest = divmod(depth - 2, 6)
        if rest or blocks_per_stage < 1:
            raise ValueError(f"depth {depth} is not 6n + 2 with n ≥ 1")
        self.conv1 = nn.Conv2d(3, widths[0], 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(widths[0])
        self.relu = nn.ReLU()
        self.layer1 = _stage(widths[0], widths[1], blocks_per_stage, stride=1)
        self.layer2 = _stage(widths[1], widths[2], blocks_per_stage, stride=2)
        self.layer3 = _stage(widths[2], widths[3], blocks_per_stage, stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(widths[3], num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, images_BCHW: torch.Tensor) -> torch.Tensor:
        """Logits (B, K)."""
        x_BCHW = self.relu(self.bn1(self.conv1(images_BCHW)))
        x_BCHW = self.layer3(self.layer2(self.layer1(x_BCHW)))
        logits_BK: torch.Tensor = self.fc(self.avgpool(x_BCHW).flatten(1))
        return logits_BK


def _stage(channels_in: int, channels_out: int, num_blocks: int, *, stride: int) -> nn.Sequential:
    first = BasicBlock(channels_in, channels_out, stride)
    return nn.Sequential(first, *(BasicBlock(channels_out, channels_out, 1) for _ in range(num_blocks - 1)))


def resnet8(num_classes: int, image_size: int = 32) -> CifarResNet:
    """Every builder here takes any `image_size`: the last map is averaged."""
    return CifarResNet(num_classes, depth=8)


def resnet14(num_classes: int, image_size: int = 32) -> CifarResNet:
    return CifarResNet(num_classes, depth=14)


def resnet20(num_classes: int, image_size: int = 32) -> CifarResNet:
    return CifarResNet(num_classes, depth=20)


def resnet32(num_classes: int, image_size: int = 32) -> CifarResNet:
    return CifarResNet(num_classes, depth=32)


def resnet44(num_classes: int, image_size: int = 32) -> CifarResNet:
    return CifarResNet(num_classes, depth=44)


def resnet56(num_classes: int, image_size: int = 32) -> CifarResNet:
    return CifarResNet(num_classes, depth=56)


def resnet110(num_classes: int, image_size: int = 32) -> CifarResNet:
    return CifarResNet(num_classes, depth=110)


def resnet8x4(num_classes: int, image_size: int = 32) -> CifarResNet:
    return CifarResNet(num_classes, depth=8, widths=WIDE_X4)


def resnet32x4(num_classes: int, image_size: int = 32) -> CifarResNet:
    return CifarResNet(num_classes, depth=32, widths=WIDE_X4)
