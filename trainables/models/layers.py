"""Layers that small models share. Every builder of them takes any `image_size`: the last map is averaged."""

from collections.abc import Callable

from torch import nn


def stage(
    block: Callable[[int, int, int], nn.Module], channels_in: int, channels_out: int, num_blocks: int, *, stride: int
) -> nn.Sequential:
    """Blocks (channels_in, channels_out, stride), of which the first changes the channels and has the stride."""
    rest = (block(channels_out, channels_out, 1) for _ in range(num_blocks - 1))
    return nn.Sequential(block(channels_in, channels_out, stride), *rest)


def init_convolutions(model: nn.Module) -> None:
    """Draw the weights of convolutions as in He et al. 2015, "Delving Deep into Rectifiers", by outputs; biases are 0."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
