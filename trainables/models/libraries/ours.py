"""The models of this project."""

from __future__ import annotations

import pkgutil
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from trainables.models.libraries.interface import Library

if TYPE_CHECKING:
    from torch import nn


class Builder(NamedTuple):
    """A callable (num_classes, image_size, **options) → nn.Module that builds a model of ours, and its options."""

    path: str
    """`module:name`, relative to `trainables.models`."""
    options: Mapping[str, Any] = {}


MODELS: dict[str, Builder] = {
    "convnet_small": Builder("small:ConvNet", {"widths": (8, 16, 32), "convs_per_stage": 1}),
    "convnet_large": Builder("small:ConvNet", {"widths": (32, 64, 128), "convs_per_stage": 2}),
    "mlp_small": Builder("small:MLP", {"hidden": (32,)}),
    "mlp_large": Builder("small:MLP", {"hidden": (256, 256)}),
    "resnet8": Builder("cifar.resnet:CifarResNet", {"depth": 8}),
    "resnet14": Builder("cifar.resnet:CifarResNet", {"depth": 14}),
    "resnet20": Builder("cifar.resnet:CifarResNet", {"depth": 20}),
    "resnet32": Builder("cifar.resnet:CifarResNet", {"depth": 32}),
    "resnet44": Builder("cifar.resnet:CifarResNet", {"depth": 44}),
    "resnet56": Builder("cifar.resnet:CifarResNet", {"depth": 56}),
    "resnet110": Builder("cifar.resnet:CifarResNet", {"depth": 110}),
    "resnet8x4": Builder("cifar.resnet:CifarResNet", {"depth": 8, "widths": (32, 64, 128, 256)}),
    "resnet32x4": Builder("cifar.resnet:CifarResNet", {"depth": 32, "widths": (32, 64, 128, 256)}),
    "wrn_16_1": Builder("cifar.wrn:CifarWideResNet", {"depth": 16, "widen": 1}),
    "wrn_16_2": Builder("cifar.wrn:CifarWideResNet", {"depth": 16, "widen": 2}),
    "wrn_40_1": Builder("cifar.wrn:CifarWideResNet", {"depth": 40, "widen": 1}),
    "wrn_40_2": Builder("cifar.wrn:CifarWideResNet", {"depth": 40, "widen": 2}),
    # Distillation papers call these vgg8, vgg13, ResNet50, MobileNetV2…, but torchvision and timm use such names for models of
    # 224-pixel images, hence the suffix.
    "resnet50_cifar": Builder("cifar.resnet:CifarResNet50"),
    "vgg8_cifar": Builder("cifar.vgg:CifarVgg", {"depth": 8}),
    "vgg11_cifar": Builder("cifar.vgg:CifarVgg", {"depth": 11}),
    "vgg13_cifar": Builder("cifar.vgg:CifarVgg", {"depth": 13}),
    "vgg16_cifar": Builder("cifar.vgg:CifarVgg", {"depth": 16}),
    "vgg19_cifar": Builder("cifar.vgg:CifarVgg", {"depth": 19}),
    "mobilenetv2_half_cifar": Builder("cifar.mobilenetv2:CifarMobileNetV2", {"width": 0.5}),
    "shufflenetv1_cifar": Builder("cifar.shufflenet:CifarShuffleNetV1"),
    "shufflenetv2_cifar": Builder("cifar.shufflenet:CifarShuffleNetV2"),
}
"""Names may be written with hyphens."""


class Ours(Library):
    name = "ours"
    modules = "trainables."

    def names(self) -> Collection[str]:
        return MODELS

    def find(self, name: str) -> str | None:
        return super().find(name.replace("-", "_"))

    def create(self, name: str, num_classes: int, image_size: int, kwargs: Mapping[str, Any]) -> nn.Module:
        from trainables.models.tap_names import without_classifier

        builder = MODELS[name]
        build = pkgutil.resolve_name(f"trainables.models.{builder.path}")
        model: nn.Module = build(num_classes or 1, image_size, **{**builder.options, **kwargs})
        return model if num_classes else without_classifier(model)

    def has_fixed_size(self, name: str) -> bool:
        return name.startswith("mlp_")

    def default_size(self, name: str) -> int | None:
        return 32 if MODELS[name].path.startswith("cifar.") else None
