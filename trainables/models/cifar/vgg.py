"""VGGs for CIFAR: Simonyan and Zisserman 2014, table 1, with BatchNorm, as in RepDistiller (Tian et al. 2020).

Five groups of 3×3 convolutions, each followed by BatchNorm and ReLU, then global average pooling and one linear layer instead of
the paper's three. A max-pool precedes the second, third and fourth group, and from 64 pixels on also the fifth; at 32 pixels maps
have 32, 16, 8, 4 and again 4 pixels. vgg8 is RepDistiller's own, with one convolution per group. Convolutions have biases
although BatchNorm follows; the published parameter counts include them.

Shapes: B batch, C channels, H W pixels, K classes.
"""

from typing import ClassVar

from torch import nn

from trainables.models.layers import init_convolutions
from trainables.models.libraries.interface import DeclaredTaps

WIDTHS = (64, 128, 256, 512, 512)
CONVOLUTIONS = {8: (1, 1, 1, 1, 1), 11: (1, 1, 2, 2, 2), 13: (2, 2, 2, 2, 2), 16: (2, 2, 3, 3, 3), 19: (2, 2, 4, 4, 4)}
"""Depth → convolutions in each group. The depth counts the paper's three linear layers, although there is one here."""


class CifarVgg(nn.Sequential):
    """`depth` is a key of CONVOLUTIONS. Groups are layer0 to layer4 with their last ReLU; RepDistiller taps the last four."""

    declared_taps = DeclaredTaps("layer0", ("layer1", "layer2", "layer3", "layer4"), "avgpool:in")
    PUBLISHED_NAMES: ClassVar[dict[str, str]] = {"block": "layer"}
    """Name parts in RepDistiller's and mdistiller's files → this model's."""

    def __init__(self, num_classes: int, image_size: int = 32, *, depth: int) -> None:
        super().__init__()
        groups = CONVOLUTIONS[depth]
        self.layer0 = _group(3, WIDTHS[0], groups[0])
        self.pool1 = nn.MaxPool2d(2)
        self.layer1 = _group(WIDTHS[0], WIDTHS[1], groups[1])
        self.pool2 = nn.MaxPool2d(2)
        self.layer2 = _group(WIDTHS[1], WIDTHS[2], groups[2])
        self.pool3 = nn.MaxPool2d(2)
        self.layer3 = _group(WIDTHS[2], WIDTHS[3], groups[3])
        self.pool4 = nn.MaxPool2d(2) if image_size >= 64 else nn.Identity()
        self.layer4 = _group(WIDTHS[3], WIDTHS[4], groups[4])
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.classifier = nn.Linear(WIDTHS[4], num_classes)
        init_convolutions(self)
        nn.init.normal_(self.classifier.weight, std=0.01)
        nn.init.zeros_(self.classifier.bias)


def _group(channels_in: int, channels_out: int, num_convolutions: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for number in range(num_convolutions):
        convolution = nn.Conv2d(channels_in if number == 0 else channels_out, channels_out, 3, padding=1)
        layers += [convolution, nn.BatchNorm2d(channels_out), nn.ReLU()]
    return nn.Sequential(*layers)
