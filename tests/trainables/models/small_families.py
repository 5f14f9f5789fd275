"""Torchvision's families with few blocks of few channels, and models of zeros, for tests of names, shapes and messages.

Drawing the initial values of the published sizes takes seconds, and tracing them on the meta device as many.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torchvision.models import ConvNeXt, DenseNet, ResNet, SwinTransformer, VisionTransformer
from torchvision.models.convnext import CNBlockConfig
from torchvision.models.resnet import BasicBlock

from trainables.models.forward import seeded
from trainables.models.registry import construct

SMALL: dict[str, Callable[[int], nn.Module]] = {
    "resnet": lambda image_size: ResNet(BasicBlock, [1, 1, 1, 1], num_classes=10),
    "densenet": lambda image_size: DenseNet(8, (2, 2, 2, 2), num_init_features=16, num_classes=10),
    "swin": lambda image_size: SwinTransformer([4, 4], 16, [1, 1, 1, 1], [2, 2, 2, 2], [7, 7], num_classes=10),
    "convnext": lambda image_size: ConvNeXt([CNBlockConfig(8, 16, 1), CNBlockConfig(16, None, 1)], num_classes=10),
    "vit": lambda image_size: VisionTransformer(image_size, 32, 2, 2, 16, 32, num_classes=10),
}
"""Name → image size → a model with 10 classes."""


def small(family: str, image_size: int) -> nn.Module:
    """A model of this family, the same for the same arguments."""
    with seeded(family):
        return SMALL[family](image_size)


class NoDraws(TorchFunctionMode):
    """A context in which tensors that are to be drawn at random are zeros."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") in ("uniform_", "normal_", "kaiming_uniform_"):
            drawn: Tensor = args[0] if args else (kwargs or {})["tensor"]
            with torch.no_grad():
                return drawn.zero_()
        return func(*args, **(kwargs or {}))


@cache
def unchanged(name: str, image_size: int) -> nn.Module:
    """A small family's model, or the model of this name with zeros for initial values; built once, so leave it as it is."""
    if name in SMALL:
        return small(name, image_size)
    with NoDraws():
        return construct(name, num_classes=10, image_size=image_size, seed=0)
