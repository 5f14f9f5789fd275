"""ResNet-50 for CIFAR: He et al. 2015, table 1, with a 3×3 stem without stride and without the max-pool.

What RepDistiller (Tian et al. 2020) calls `ResNet50`, with its parameter names: four stages of 3, 4, 6 and 3 bottlenecks on maps
of 32, 16, 8 and 4 pixels with 256, 512, 1024 and 2048 channels. The stride stands in the 3×3 convolution, as in torchvision's
ResNet-50; the paper has it in the first 1×1.

Every activation is a module of its own and none is in place. Shapes: B batch, C channels, H W pixels, K classes.
"""

from __future__ import annotations

import torch
from torch import nn

from trainables.models.cifar.layers import init_convolutions, stage


class Bottleneck(nn.Module):
    """relu(conv1x1(conv3x3(conv1x1(x))) + shortcut(x)), inside a quarter as wide; BatchNorm after each convolution."""

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        hidden = channels_out // 4
        self.conv1 = nn.Conv2d(channels_in, hidden, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(hidden)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(hidden, hidden, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(hidden)
        self.relu2 = nn.ReLU()
        self.conv3 = nn.Conv2d(hidden, channels_out, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(channels_out)
        self.relu3 = nn.ReLU()
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels_in != channels_out:
            projection = nn.Conv2d(channels_in, channels_out, 1, stride=stride, bias=False)
            self.shortcut = nn.Sequential(projection, nn.BatchNorm2d(channels_out))

    def forward(self, x_BCHW: torch.Tensor) -> torch.Tensor:
        out_BCHW = self.relu1(self.bn1(self.conv1(x_BCHW)))
        out_BCHW = self.relu2(self.bn2(self.conv2(out_BCHW)))
        out_BCHW = self.bn3(self.conv3(out_BCHW))
        activated_BCHW: torch.Tensor = self.relu3(out_BCHW + self.shortcut(x_BCHW))
        return activated_BCHW


class CifarResNet50(nn.Module):
    """Stem of 64 channels, four stages, global average pooling, one linear layer."""

    def __init__(self, num_classes: int, image_size: int = 32) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU()
        self.layer1 = stage(Bottleneck, 64, 256, 3, stride=1)
        self.layer2 = stage(Bottleneck, 256, 512, 4, stride=2)
        self.layer3 = stage(Bottleneck, 512, 1024, 6, stride=2)
        self.layer4 = stage(Bottleneck, 1024, 2048, 3, stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.linear = nn.Linear(2048, num_classes)
        init_convolutions(self)

    def forward(self, images_BCHW: torch.Tensor) -> torch.Tensor:
        """Logits (B, K)."""
        x_BCHW = self.relu(self.bn1(self.conv1(images_BCHW)))
        x_BCHW = self.layer4(self.layer3(self.layer2(self.layer1(x_BCHW))))
        logits_BK: torch.Tensor = self.linear(self.avgpool(x_BCHW).flatten(1))
        return logits_BK
