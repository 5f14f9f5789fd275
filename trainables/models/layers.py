"""Layers shared by the small models, which accept any `image_size` because they average the last map."""

from collections.abc import Callable

from torch import nn


def stage(
    block: Callable[[int, int, int], nn.Module], channels_in: int, channels_out: int, num_blocks: int, *, stride: int
) -> nn.Sequential:
    """Build blocks (channels_in, channels_out, stride); the first one changes the channels and has the stride."""
    rest = (block(channels_out, channels_out, 1) for _ in range(num_blocks - 1))
    return nn.Sequential(block(channels_in, channels_out, stride), *rest)


def init_convolutions(model: nn.Module) -> None:
    """Initialize convolutions as in He et al. 2015, "Delving Deep into Rectifiers", by fan-out, with zero biases."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
