"""timm's classifiers: by name, from a folder saved by timm (`local-dir:`), or from the Hugging Face Hub (`hf-hub:`)."""

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
"""A model's stem: its first `feature_info` entry if that is one of these, otherwise the first of these that it has."""
MAPS = ("global_pool:in", "head.global_pool:in", "encoder", "norm", "final_conv", "stages")
"""A model's last map or tokens: the first of these that it has, unless its class is in `OTHER_MAPS`."""
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
"""Modules that pool a transformer's tokens or normalize the pooled vector; a model with neither is read at its class token."""


class Timm(Library):
    name = "timm"
    modules = "timm."
    has_hub = True

    def names(self) -> Collection[str]:
        return registered("timm")

    def find(self, name: str) -> str | None:
        """Read the config.json of a folder or repository; None for a transformers model."""
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
                f"model {name!r} includes a weights tag: write model: timm/{model} and, for a teacher, weights: {tag}"
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
            notice(f"weights {weights} of {shown}: timm resamples position tables from {size}×{size} images to {image_size}")
        try:
            use_cache_without_network()
            model: nn.Module = timm.create_model(
                full_name, pretrained=True, num_classes=config["num_classes"], **options, **kwargs
            )
        except Exception as error:  # any way in which the network, the hub's client or the disk can fail
            source = config.get("hf_hub_id") or config.get("url") or weights
            raise ModelError(
                f"weights {weights} of {shown} could not be loaded from {source} ({first_line(error)}):"
                " download them on a machine with network access, and give the file's path as the weights"
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

            names = tuple(ResNet18_Weights.DEFAULT.meta["categories"])  # unlike timm's, none is ambiguous
        elif ids:
            names = tuple(_imagenet_info(num_classes).label_descriptions())
        resize = math.floor(size / record["crop_pct"])
        shape = (size, tuple(record["mean"]), tuple(record["std"]), num_classes, resize, record["interpolation"])
        return TrainedInput(*shape, names, ids)

    def has_fixed_size(self, name: str) -> bool:
        return bool(_size_options(name, 0))

    def default_size(self, name: str) -> int | None:
        import timm

        published = timm.get_pretrained_cfg(architecture(name))  # exists for models without weights, too
        return published.input_size[-1] if published is not None else None

    def taps(self, model: nn.Module) -> DeclaredTaps:
        """Read `feature_info`. A ViT's blocks of equal resolution are not stages, nor Hiera's, with tokens in window order."""
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
            if not layout.num_prefix_tokens:  # the model does not record the position of its class token
                return DeclaredTaps(stem, stages)
            embedding = embedding or Tap(last_map, first_token, "class token")
        return DeclaredTaps(stem, stages, last_map, layout, embedding)

    def convert(self, model: nn.Module, state: dict[str, Tensor], image_size: int) -> Mapping[str, Tensor]:
        convert = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
        converted: Mapping[str, Tensor] = convert(state, model) if convert is not None else {}
        return converted

    def name_for_file(self, name: str, path: Path) -> str:
        """Return the file's folder if timm saved the model's config there."""
        folder = _folder_of(path)
        return name_with_weights(name, folder) if folder else name


def architecture(name: str) -> str:
    """Return timm's architecture name, also of a folder's or repository's model. Raises ModelError: it is not a timm model."""
    if not name.startswith((FOLDER_SCHEME, *HUB_SCHEMES)):
        return name
    config = source_config(name)
    source, model = name.removeprefix(FOLDER_SCHEME), config.get("architecture") if isinstance(config, dict) else None
    if model in registered("timm"):
        return str(model)
    if is_of_transformers(config):
        raise ModelError(f"{source} is a transformers {config['model_type']}, not a timm model: write model: {name}")
    raise ModelError(
        f"{source} is not a timm model (architecture {model!r} in its {CONFIG}): choose one that timm has saved, or write the "
        "model's name with a state dict as its weights"
    )


def name_with_weights(name: str, weights: str) -> str:
    """Return timm's name of a model with these weights. Raises ModelError: they do not exist or belong to another model."""
    if weights.startswith((FOLDER_SCHEME, *HUB_SCHEMES)):
        if (saved := architecture(weights)) != (wanted := architecture(name)):
            raise ModelError(f"{weights} has a {saved}, not a {wanted}: write timm/{saved} as the model, or choose other weights")
        return weights
    if weights == "DEFAULT" and name.startswith((FOLDER_SCHEME, *HUB_SCHEMES)):
        return name
    import timm

    tags = [full_name.partition(".")[2] for full_name in timm.list_pretrained(f"{name}.*")]
    check_known(f"{PREFIX}{name}", weights, tags, *(["DEFAULT"] if tags else []))
    return name if weights == "DEFAULT" else f"{name}.{weights}"


def pretrained_config(full_name: str) -> dict[str, Any]:
    """Return timm's record of the weights `full_name` (see `name_with_weights`): num_classes, input_size, mean, crop_pct …."""
    import timm

    if full_name.startswith((FOLDER_SCHEME, *HUB_SCHEMES)):
        config = source_config(full_name)
        record = {**config.get("pretrained_cfg", config)}
        record |= {key: config[key] for key in ("num_classes", "label_names") if key in config}
    else:
        record = timm.get_pretrained_cfg(full_name).to_dict()
    return {**timm.models.PretrainedCfg().to_dict(), "label_names": None, **record}


def wordnet_ids(num_classes: int) -> tuple[str, ...]:
    """Return the WordNet ids of the ImageNet subset with `num_classes` classes, in label order; () if unknown or without timm."""
    if not installed("timm") or (info := _imagenet_info(num_classes)) is None:
        return ()
    ids = tuple(info.label_names())
    return ids if len(ids) == num_classes else ()


def _imagenet_info(num_classes: int) -> Any:
    from timm.data import ImageNetInfo, infer_imagenet_subset

    subset = infer_imagenet_subset({"num_classes": num_classes})
    return ImageNetInfo(subset) if subset else None


def _folder_of(path: Path) -> str | None:
    """Return `local-dir:` with a weight file's folder, or None if it has no timm config: many programs write a config.json."""
    folder = f"{FOLDER_SCHEME}{path.parent}"
    try:
        architecture(folder)
    except ModelError:
        return None
    return folder


def is_of_transformers(config: Any) -> bool:
    """Whether a config.json describes a transformers model; one with a timm architecture belongs to timm."""
    return isinstance(config, dict) and "model_type" in config and config.get("architecture") not in registered("timm")


def source_name(name: str) -> str:
    """Normalize the name of a folder's or repository's model. Raises ModelError: it is not a repository name."""
    scheme, _, source = name.partition(":")
    if f"{scheme}:" == FOLDER_SCHEME:
        return f"{FOLDER_SCHEME}{expand_home(source)}"
    if not re.fullmatch(r"[\w.-]+/[\w.-]+(@[\w./-]+)?", source):
        raise ModelError(f"model {name!r} is not a Hugging Face Hub repository: write hf-hub:OWNER/NAME")
    return f"hf-hub:{source}"


def source_of(name: str) -> tuple[str, str | None]:
    """Split a name into its repository and revision; None is the newest revision."""
    repository, _, revision = name.partition(":")[2].partition("@")
    return repository, revision or None


def source_config(name: str, file: str = CONFIG) -> Any:
    """Read a JSON file of a folder or repository. Raises ModelError: it cannot be read."""
    return _hub_config(name, file) if name.startswith(HUB_SCHEMES) else _folder_config(name, file)


def _folder_config(name: str, file: str) -> Any:
    path = Path(name.removeprefix(FOLDER_SCHEME)) / file
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read ({first_line(error)}): give a folder saved by timm or transformers") from None


def use_cache_without_network() -> None:
    """Set the Hub client offline if the Hub's host name does not resolve: it would otherwise retry for 23 s per file."""
    from huggingface_hub import constants

    if not getproxies().keys() - {"no"}:  # a proxy resolves the address itself
        try:
            socket.getaddrinfo(urlsplit(constants.ENDPOINT).hostname, None)
        except socket.gaierror:
            constants.HF_HUB_OFFLINE = True


@cache
def _hub_config(name: str, file: str) -> Any:
    """Download a JSON file once per process."""
    repository, revision = source_of(name)
    if not installed("huggingface_hub"):
        raise ModelError(f"{name} needs huggingface_hub: `pip install raydistill[timm]` or `raydistill[transformers]`")
    try:
        from huggingface_hub import hf_hub_download

        use_cache_without_network()
        return json.loads(Path(hf_hub_download(repository, file, revision=revision)).read_text(encoding="utf-8"))
    except Exception as error:  # any way in which the network, the hub's client or the disk can fail
        raise ModelError(
            f"{name}: its {file} could not be loaded from the Hugging Face Hub ({first_line(error)}): download the "
            f"repository on a machine with network access, and write {FOLDER_SCHEME}FOLDER"
        ) from None


def _size_options(name: str, image_size: int) -> dict[str, Any]:
    """Return the size arguments for the constructor of a model with a position table."""
    import timm

    published = timm.get_pretrained_cfg(architecture(name))
    own_size = published.input_size[-1] if published is not None and ":" not in name else None
    return {"img_size": image_size} if published is not None and published.fixed_input_size and own_size != image_size else {}
