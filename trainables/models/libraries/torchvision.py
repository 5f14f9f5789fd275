"""torchvision's classifiers."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainables.errors import ModelError, first_line
from trainables.models.libraries.interface import (
    DeclaredTaps,
    Layout,
    Library,
    Tap,
    TrainedInput,
    as_arguments,
    check_known,
    first_token,
    registered,
)
from trainables.models.libraries.timm import wordnet_ids

if TYPE_CHECKING:
    from torch import Tensor, nn

RESCALING = ("googlenet", "inception_v3")
"""Models that rescale their input with the published weights only; the tensors do not show it."""
LAYERS = tuple(f"layer{number}" for number in (1, 2, 3, 4))
FAMILIES: dict[str, DeclaredTaps] = {
    "ResNet": DeclaredTaps("maxpool", LAYERS, "avgpool:in"),
    "DenseNet": DeclaredTaps("features.pool0", [f"features.denseblock{number}" for number in (1, 2, 3, 4)]),
    "ShuffleNetV2": DeclaredTaps("maxpool", ["stage2", "stage3", "stage4"], "conv5"),
    "GoogLeNet": DeclaredTaps("maxpool2", ["inception3b", "inception4e", "inception5b"], "avgpool:in"),
    "Inception3": DeclaredTaps("maxpool2", ["Mixed_5d", "Mixed_6e", "Mixed_7c"], "avgpool:in"),
    "RegNet": DeclaredTaps("stem", [f"trunk_output.block{number}" for number in (1, 2, 3, 4)], "avgpool:in"),
    "SwinTransformer": DeclaredTaps(
        "features.0", [f"features.{index}" for index in (1, 3, 5, 7)], "norm", Layout(channels_last=True)
    ),
    "MaxVit": DeclaredTaps("stem", [f"blocks.{index}" for index in (0, 1, 2, 3)], "classifier.0:in"),
    "VisionTransformer": DeclaredTaps(
        map="encoder.ln", layout=Layout(num_prefix_tokens=1), embedding=Tap("encoder.ln", first_token, "class token")
    ),
}
"""Class → its declared taps."""
CHAINS: dict[str, tuple[str, int, int | None, str, str]] = {
    "AlexNet": ("features", 0, -1, "features.1", "avgpool:in"),
    "SqueezeNet": ("features", 3, None, "features.2", "features"),
    "MobileNetV2": ("features", 1, -1, "features.0", "features"),
    "MobileNetV3": ("features", 1, -1, "features.0", "avgpool:in"),
    "EfficientNet": ("features", 1, -1, "features.0", "avgpool:in"),
    "ConvNeXt": ("features", 1, None, "features.0", "avgpool:in"),
    "MNASNet": ("layers", 8, -3, "layers.7", "layers"),
    "VGG": ("features", 0, -1, "", "avgpool:in"),
}
"""Class → a Sequential, the slice of it that forms the stages, the stem and the last map.

A stage ends before a module that halves the map. VGG's stem is its first activation.
"""


class Torchvision(Library):
    name = "torchvision"
    modules = "torchvision."

    def names(self) -> Collection[str]:
        return registered("torchvision")

    def create(self, name: str, num_classes: int, image_size: int, kwargs: Mapping[str, Any]) -> nn.Module:
        import torchvision

        from trainables.models.tap_names import without_classifier

        options = _options(name, num_classes, image_size)
        model: nn.Module = torchvision.models.get_model(name, weights=None, num_classes=num_classes or 1, **options, **kwargs)
        return model if num_classes else without_classifier(model)

    def constructor(self, name: str, num_classes: int, image_size: int, kwargs: Mapping[str, Any]) -> list[str]:
        options = as_arguments(_options(name, num_classes, image_size) | dict(kwargs))
        build = f"model = torchvision.models.get_model({name!r}, weights=None, num_classes={num_classes or 1}{options})"
        if num_classes:
            return ["import torchvision", build]
        import torch
        import torchvision

        from trainables.models.tap_names import classifier

        with torch.device("meta"):
            whole = torchvision.models.get_model(name, weights=None, **_options(name, num_classes, image_size), **kwargs)
        last = classifier(whole)
        path = next(path for path, module in whole.named_modules() if module is last)
        return ["import torch, torchvision", build, f"model.set_submodule({path!r}, torch.nn.Identity())"]

    def published(self, name: str, weights: str, image_size: int, kwargs: Mapping[str, Any]) -> nn.Module:
        import torch
        import torchvision

        known = torchvision.models.get_model_weights(name).__members__
        check_known(name, weights, list(known))
        published = known[weights]
        # torchvision builds the model, as some rename old parameters or rescale their input for these weights.
        try:
            model: nn.Module = torchvision.models.get_model(
                name, weights=published, progress=False, **_size_options(name, image_size), **kwargs
            )
        except ValueError as error:
            raise ModelError(
                f"weights {weights} of {name} do not accept images of {image_size}×{image_size} ({first_line(error)}):"
                f" set teacher.image_size to {published.meta['min_size'][0]}"
            ) from None
        except Exception as error:  # any way in which the network, a proxy or the disk can fail
            raise ModelError(
                f"weights {weights} of {name} could not be loaded from {published.url} ({first_line(error)}):"
                f" put that file into {Path(torch.hub.get_dir()) / 'checkpoints'}"
            ) from None
        return model

    def input(self, name: str, weights: str) -> TrainedInput | None:
        from torchvision.models import get_model_weights

        if Path(weights).is_file():
            return None
        known = get_model_weights(name).__members__
        check_known(name, weights, list(known))
        images, names = known[weights].transforms(), tuple(known[weights].meta["categories"] or ())
        (size,), (resize,) = images.crop_size, images.resize_size
        shape = (size, tuple(images.mean), tuple(images.std), len(names), resize, images.interpolation.value)
        return TrainedInput(*shape, names, wordnet_ids(len(names)))

    def has_fixed_size(self, name: str) -> bool:
        return bool(_size_options(name, 0))

    def taps(self, model: nn.Module) -> DeclaredTaps:
        from torch import nn

        family = type(model).__name__
        if family in FAMILIES:
            return FAMILIES[family]
        if family not in CHAINS:
            return DeclaredTaps()
        path, first, stop, stem, last_map = CHAINS[family]
        chain = list(model.get_submodule(path).children())
        indices = range(len(chain))[first:stop]
        stages = [f"{path}.{index}" for index in indices if index == indices[-1] or _halves(chain[index + 1])]
        stem = stem or f"{path}.{next(index for index, each in enumerate(chain) if isinstance(each, nn.ReLU))}"
        return DeclaredTaps(stem, stages, last_map)

    def convert(self, model: nn.Module, state: dict[str, Tensor], image_size: int) -> Mapping[str, Tensor]:
        from torchvision.models.vision_transformer import VisionTransformer, interpolate_embeddings

        if not isinstance(model, VisionTransformer):
            return {}
        resampled: Mapping[str, Tensor] = interpolate_embeddings(image_size, model.patch_size, state)
        return resampled

    def rescales_input(self, name: str, path: Path) -> bool:
        """Compare the file's SHA-256 with the one in the URL of the published weights."""
        if name not in RESCALING:
            return False
        import torchvision

        from trainables.data.index import file_sha256

        published = torchvision.models.get_model_weights(name)
        return any(weights.url.endswith(f"-{file_sha256(path)[:8]}.pth") for weights in published)


def _halves(module: nn.Module) -> bool:
    return any(getattr(part, "stride", 1) in (2, (2, 2)) for part in module.modules())


def _options(name: str, num_classes: int, image_size: int) -> dict[str, Any]:
    """Return the constructor arguments that the user does not set."""
    rescaling = {"init_weights": True, "aux_logits": num_classes > 0} if name in RESCALING else {}
    return _size_options(name, image_size) | rescaling


def _size_options(name: str, image_size: int) -> dict[str, Any]:
    """Return the size arguments for the constructor of a model with a position table."""
    if name.startswith("vit_"):
        return {"image_size": image_size}
    return {"input_size": (image_size, image_size)} if name.startswith("maxvit_") else {}
