"""timm's classifiers, by name, from a folder that timm has saved (`local-dir:`), or from the Hugging Face Hub (`hf-hub:`)."""

from __future__ import annotations

import json
import math
import re
import socket
import sys
from collections.abc import Collection, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from trainables.config.models import FOLDER_SCHEME, HUB_SCHEMES
from trainables.errors import ModelError, closest_matches, first_line
from trainables.models.libraries.interface import (
    WORDNET_ID,
    BlockEnd,
    DeclaredTaps,
    Layout,
    Library,
    Tap,
    TrainedInput,
    as_arguments,
    check_known,
    first_token,
    installed,
    registered,
)
from trainables.notices import notice
from trainables.rundir import expand_home

if TYPE_CHECKING:
    from torch import Tensor, nn

PREFIX = "timm/"
CONFIG = "config.json"
STEMS = ("act1", "bn1", "stem", "stem.conv", "conv_stem", "features.norm0", "patch_embed")
"""What of a model's `feature_info` is its stem; where nothing is, the first of these that it has."""
MAPS = ("global_pool:in", "head.global_pool:in", "encoder", "norm", "final_conv", "stages")
"""The last map, or its tokens, is the first of these that a model has, unless its class is in `OTHER_MAPS`."""
OTHER_MAPS = {
    "VGG": "features",
    "CPUBone": "stages",
    "EfficientVit": "stages",
    "EfficientVitLarge": "stages",
    "LowFormer": "stages",
    "Hiera": "head:in",
    "HieraDet": "head:in",
}
POOLS = ("attn_pool", "fc_norm")
"""What makes one vector of a transformer's tokens, or normalizes it; a class token is read where there is neither."""
BLOCKS = {
    "timm.models.resnet.BasicBlock": BlockEnd("act2:in", "bn2"),
    "timm.models.resnet.Bottleneck": BlockEnd("act3:in", "bn3"),
    "timm.models._efficientnet_blocks.InvertedResidual": BlockEnd("", "bn3"),
    "timm.models._efficientnet_blocks.DepthwiseSeparableConv": BlockEnd("", "bn2"),
    "timm.models._efficientnet_blocks.EdgeResidual": BlockEnd("", "bn2"),
    "timm.models._efficientnet_blocks.ConvBnAct": BlockEnd("bn1.act:in", "bn1"),
    "timm.models.convnext.ConvNeXtStage": BlockEnd(""),
    "timm.models.swin_transformer.SwinTransformerStage": BlockEnd(""),
}


class Timm(Library):
    name = "timm"
    has_hub = True

    def names(self) -> Collection[str]:
        return registered("timm")

    def find(self, name: str) -> str | None:
        """The config.json of a folder or repository is read: those of transformers are left to its library."""
        if not name.startswith((PREFIX, FOLDER_SCHEME, *HUB_SCHEMES)):
            return super().find(name)
        source = name.partition(":")[2]
        of_timm = source.startswith(PREFIX) and source.removeprefix(PREFIX).partition(".")[0] in self.names()
        in_source = not of_timm and not name.startswith(PREFIX)
        if in_source and is_of_transformers(source_config(source_name(name))):
            return None
        if not installed("timm"):
            raise ModelError(f"model {name!r} needs timm, which is not installed: `pip install raydistill[timm]`")
        if not in_source:
            return self._registered_name(name, (source or name).removeprefix(PREFIX))
        architecture(source_name(name))
        return source_name(name)

    def _registered_name(self, name: str, model: str) -> str:
        model, _, tag = model.partition(".")
        if model not in self.names():
            similar = closest_matches(model.lower(), self.names())
            raise ModelError(
                f"timm has no model {model!r}; " + (f"did you mean timm/{similar[0]}?" if similar else "see timm.list_models()")
            )
        if tag:
            raise ModelError(
                f"model {name!r} names weights as well: write model: timm/{model} and, for a teacher, weights: {tag}"
            )
        return model

    def create(self, name: str, num_classes: int, image_size: int, kwargs: Mapping[str, Any]) -> nn.Module:
        import timm

        model: nn.Module = timm.create_model(name, num_classes=num_classes, **_size_options(name, image_size), **kwargs)
        return model

    def constructor(self, name: str, num_classes: int, image_size: int, kwargs: Mapping[str, Any]) -> list[str]:
        options = as_arguments(_size_options(name, image_size) | dict(kwargs))
        return ["import timm", f"model = timm.create_model({name!r}, num_classes={num_classes}{options})"]

    def published(self, name: str, weights: str, image_size: int, kwargs: Mapping[str, Any]) -> nn.Module:
        import timm

        full_name = name_with_weights(name, weights)
        config, options, shown = pretrained_config(full_name), _size_options(name, image_size), f"{PREFIX}{name}"
        if "img_size" in options and (size := config["input_size"][-1]) != image_size:
            notice(f"weights {weights} of {shown}: timm resamples its tables from images of {size}×{size} to {image_size}")
        try:
            use_cache_without_network()
            model: nn.Module = timm.create_model(
                full_name, pretrained=True, num_classes=config["num_classes"], **options, **kwargs
            )
        except Exception as error:  # any way in which the network, the hub's client or the disk can fail
            source = config.get("hf_hub_id") or config.get("url") or weights
            raise ModelError(
                f"weights {weights} of {shown} could not be loaded from {source} ({first_line(error)}):"
                " fetch them where there is a network and give the file's path as the weights"
            ) from None
        return model

    def input(self, name: str, weights: str) -> TrainedInput | None:
        source = _folder_of(Path(weights)) if Path(weights).is_file() else weights
        if source is None:
            return None
        record = pretrained_config(name_with_weights(name, source))
        size, num_classes = record["input_size"][-1], record["num_classes"]
        names: tuple[str, ...] = ()
        ids = wordnet_ids(num_classes)
        if labels := record["label_names"]:
            in_order = [labels[key] for key in sorted(labels, key=int)] if isinstance(labels, dict) else labels
            names = tuple(map(str, in_order))
            ids = names if all(map(WORDNET_ID.fullmatch, names)) else ()
        elif num_classes == 1000:
            from torchvision.models import ResNet18_Weights

            names = tuple(ResNet18_Weights.DEFAULT.meta["categories"])  # without ambiguous ones
        elif ids:
            names = tuple(_imagenet_info(num_classes).label_descriptions())
        resize = math.floor(size / record["crop_pct"])
        shape = (size, tuple(record["mean"]), tuple(record["std"]), num_classes, resize, record["interpolation"])
        return TrainedInput(*shape, names, ids)

    def has_fixed_size(self, name: str) -> bool:
        return bool(_size_options(name, 0))

    def default_size(self, name: str) -> int | None:
        import timm

        published = timm.get_pretrained_cfg(architecture(name))  # of models without weights, too
        return published.input_size[-1] if published is not None else None

    def owns(self, model: nn.Module) -> bool:
        return type(model).__module__.startswith("timm.")

    def taps(self, model: nn.Module) -> DeclaredTaps:
        """By its `feature_info`; a ViT's blocks of one resolution are no stages; Hiera's tokens are in the order of windows."""
        from torch import nn

        modules = dict(model.named_modules())
        info = getattr(model, "feature_info", None) or []
        info = [each for each in getattr(info, "info", info) if not isinstance(modules.get(each["module"]), nn.MaxPool2d)]
        if len({each["reduction"] for each in info}) < 2 or type(model).__name__ == "Hiera":
            info = []
        points = [each["module"] + (":in" if each.get("hook_type") == "forward_pre" else "") for each in info]
        stem = next((path for path in (*points[:1], *STEMS) if path in STEMS and path in modules), None) if points else None
        stages = [path for path in points if path != stem]
        last_map = OTHER_MAPS.get(type(model).__name__) or next(
            (path for path in MAPS if path.removesuffix(":in") in modules), None
        )
        layout = Layout(getattr(model, "output_fmt", None) == "NHWC", getattr(model, "num_prefix_tokens", 0))
        pools = (path for path in POOLS if not isinstance(modules.get(path), nn.Identity | None))
        embedding = next(map(Tap, pools), None)
        if getattr(model, "cls_token", None) is not None and last_map is not None:
            if not layout.num_prefix_tokens:  # where its class token is, the model does not say
                return DeclaredTaps(stem, stages, blocks=BLOCKS)
            embedding = embedding or Tap(last_map, first_token, "class token")
        return DeclaredTaps(stem, stages, last_map, layout, embedding, blocks=BLOCKS)

    def convert(self, model: nn.Module, state: dict[str, Tensor], image_size: int) -> Mapping[str, Tensor]:
        convert = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
        converted: Mapping[str, Tensor] = convert(state, model) if convert is not None else {}
        return converted

    def name_for_file(self, name: str, path: Path) -> str:
        """The folder where timm saved there how the model is built."""
        folder = _folder_of(path)
        return name_with_weights(name, folder) if folder else name


def architecture(name: str) -> str:
    """timm's name of an architecture, also of a folder's or a repository's model. Raises ModelError: it is not timm's."""
    if not name.startswith((FOLDER_SCHEME, *HUB_SCHEMES)):
        return name
    config = source_config(name)
    source, model = name.removeprefix(FOLDER_SCHEME), config.get("architecture") if isinstance(config, dict) else None
    if model in registered("timm"):
        return str(model)
    if is_of_transformers(config):
        raise ModelError(f"{source} is a {config['model_type']} of transformers, not timm's: write model: {name}")
    raise ModelError(
        f"{source} is no model that timm knows (architecture {model!r} in its {CONFIG}): write one that timm has saved, or the "
        "model's name and a state dict as its weights"
    )


def name_with_weights(name: str, weights: str) -> str:
    """timm's name of a model with these weights. Raises ModelError: there are none of this name, or they are another model's."""
    if weights.startswith((FOLDER_SCHEME, *HUB_SCHEMES)):
        if (saved := architecture(weights)) != (wanted := architecture(name)):
            raise ModelError(f"{weights} has a {saved}, not a {wanted}: write timm/{saved} as the model, or give other weights")
        return weights
    if weights == "DEFAULT" and name.startswith((FOLDER_SCHEME, *HUB_SCHEMES)):
        return name
    import timm

    tags = [full_name.partition(".")[2] for full_name in timm.list_pretrained(f"{name}.*")]
    check_known(f"{PREFIX}{name}", weights, tags, *(["DEFAULT"] if tags else []))
    return name if weights == "DEFAULT" else f"{name}.{weights}"


def pretrained_config(full_name: str) -> dict[str, Any]:
    """timm's record of the weights of `name_with_weights`: num_classes, input_size, mean, std, crop_pct …."""
    import timm

    if full_name.startswith((FOLDER_SCHEME, *HUB_SCHEMES)):
        config = source_config(full_name)
        record = {**config.get("pretrained_cfg", config)}
        record |= {key: config[key] for key in ("num_classes", "label_names") if key in config}
    else:
        record = timm.get_pretrained_cfg(full_name).to_dict()
    return {**timm.models.PretrainedCfg().to_dict(), "label_names": None, **record}


def wordnet_ids(num_classes: int) -> tuple[str, ...]:
    """The WordNet ids of the part of ImageNet with so many classes, in label order; () without timm, which knows them."""
    if not installed("timm") or (info := _imagenet_info(num_classes)) is None:
        return ()
    ids = tuple(info.label_names())
    return ids if len(ids) == num_classes else ()


def _imagenet_info(num_classes: int) -> Any:
    from timm.data import ImageNetInfo, infer_imagenet_subset

    subset = infer_imagenet_subset({"num_classes": num_classes})
    return ImageNetInfo(subset) if subset else None


def _folder_of(path: Path) -> str | None:
    """`local-dir:` with the folder of a file of weights; None where timm has not saved it: many programs write a config.json."""
    folder = f"{FOLDER_SCHEME}{path.parent}"
    try:
        architecture(folder)
    except ModelError:
        return None
    return folder


def is_of_transformers(config: Any) -> bool:
    """Whether a config.json is of a model of Hugging Face transformers; timm's own in it are timm's."""
    return isinstance(config, dict) and "model_type" in config and config.get("architecture") not in registered("timm")


def source_name(name: str) -> str:
    """The name of a folder's or a repository's model in one spelling. Raises ModelError: it is no repository."""
    scheme, _, source = name.partition(":")
    if f"{scheme}:" == FOLDER_SCHEME:
        return f"{FOLDER_SCHEME}{expand_home(source)}"
    if not re.fullmatch(r"[\w.-]+/[\w.-]+(@[\w./-]+)?", source):
        raise ModelError(f"model {name!r} is no repository of the Hugging Face Hub: write hf-hub:OWNER/NAME")
    return f"hf-hub:{source}"


def source_of(name: str) -> tuple[str, str | None]:
    """A repository, and its revision or None for the newest one."""
    repository, _, revision = name.partition(":")[2].partition("@")
    return repository, revision or None


def source_config(name: str, file: str = CONFIG) -> Any:
    """What a JSON file of a folder, or of a repository, has. Raises ModelError: it cannot be read."""
    return _hub_config(name, file) if name.startswith(HUB_SCHEMES) else _folder_config(name, file)


def _folder_config(name: str, file: str) -> Any:
    path = Path(name.removeprefix(FOLDER_SCHEME)) / file
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{path} cannot be read ({first_line(error)}): give a folder that timm or transformers has saved"
        ) from None


def use_cache_without_network() -> None:
    """Set the Hub's client to its offline mode where the Hub's host has no address: it would try for 23 s, for each file."""
    from huggingface_hub import constants

    if not getproxies().keys() - {"no"}:  # a proxy finds the address itself
        try:
            socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname, None)
        except socket.gaierror:
            constants.HF_HUB_OFFLINE = True


@cache
def _hub_config(name: str, file: str) -> Any:
    """Downloaded once."""
    repository, revision = source_of(name)
    if not installed("huggingface_hub"):
        raise ModelError(f"{name} is read by huggingface_hub: `pip install raydistill[timm]` or `raydistill[transformers]`")
    try:
        from huggingface_hub import hf_hub_download

        use_cache_without_network()
        return json.loads(Path(hf_hub_download(repository, file, revision=revision)).read_text(encoding="utf-8"))
    except Exception as error:  # any way in which the network, the hub's client or the disk can fail
        raise ModelError(
            f"{name}: its {file} could not be loaded from the Hugging Face Hub ({first_line(error)}): fetch the "
            f"repository where there is a network, and write {FOLDER_SCHEME}FOLDER"
        ) from None


def _size_options(name: str, image_size: int) -> dict[str, Any]:
    """The constructor arguments that depend on the image size, of models with a position table."""
    import timm

    published = timm.get_pretrained_cfg(architecture(name))
    own_size = published.input_size[-1] if published is not None and ":" not in name else None
    return {"img_size": image_size} if published is not None and published.fixed_input_size and own_size != image_size else {}
