"""ResNets for CIFAR: He et al. 2015, "Deep Residual Learning for Image Recognition", section 4.2.

Depth 6n + 2: a 3×3 stem, three stages of n basic blocks on maps of 32, 16 and 8 pixels, global average pooling, one linear layer.
If a stage changes the shape, the shortcut is a 1×1 convolution with BatchNorm, the paper's option B. The paper's own CIFAR runs
pad with zeros, option A, which has 2,752 fewer parameters. RepDistiller (Tian et al. 2020), whose models the distillation papers
compare, has option B; parameter names and shapes are the same as there. The `x4` models are also RepDistiller's, with a stem of
32 channels and stages four times as wide.

`CifarResNet50` is RepDistiller's `ResNet50`: table 1 of the paper with a 3×3 stem without stride and without the max-pool, so
that maps have 32, 16, 8 and 4 pixels. The 3×3 convolution has the stride, as in torchvision's ResNet-50; in the paper it is the
first 1×1.

Every activation is a separate module and not in place, so that its input can be tapped as well.

Shapes: B batch, C channels, H W pixels, K classes.
"""

import torch
from torch import nn

from trainables.models.layers import init_convolutions, stage
from trainables.models.libraries.interface import DeclaredTaps


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


class CifarResNet(nn.Sequential):
    """A ResNet with `depth` weighted layers; `widths` are the channels of the stem and of the three stages."""

    declared_taps = DeclaredTaps("relu", ("layer1", "layer2", "layer3"), "avgpool:in")

    def __init__(
        self, num_classes: int, image_size: int = 32, *, depth: int, widths: tuple[int, int, int, int] = (16, 16, 32, 64)
    ) -> None:
        super().__init__()
        blocks_per_stage, rest = divmod(depth - 2, 6)
        if rest or blocks_per_stage < 1:
            raise ValueError(f"depth {depth} is not 6n + 2 with n ≥ 1")
        self.conv1 = nn.Conv2d(3, widths[0], 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(widths[0])
        self.relu = nn.ReLU()
        self.layer1 = stage(BasicBlock, widths[0], widths[1], blocks_per_stage, stride=1)
        self.layer2 = stage(BasicBlock, widths[1], widths[2], blocks_per_stage, stride=2)
        self.layer3 = stage(BasicBlock, widths[2], widths[3], blocks_per_stage, stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.fc = nn.Linear(widths[3], num_classes)
        init_convolutions(self)


class Bottleneck(nn.Module):
    """relu(conv1x1(conv3x3(conv1x1(x))) + shortcut(x)), a quarter as wide inside, with BatchNorm after each convolution."""

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


class CifarResNet50(nn.Sequential):
    """Stem of 64 channels, stages of 3, 4, 6 and 3 bottlenecks with 256, 512, 1024 and 2048 channels."""

    declared_taps = DeclaredTaps("relu", ("layer1", "layer2", "layer3", "layer4"), "avgpool:in")

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
        self.flatten = nn.Flatten()
        self.linear = nn.Linear(2048, num_classes)
        init_convolutions(self)
