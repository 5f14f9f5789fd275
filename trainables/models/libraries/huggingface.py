"""Vision models of Hugging Face transformers, from a folder saved by it (`local-dir:`) or from the Hub (`hf-hub:`).

The config.json there identifies the model and its architecture. Code in a folder or repository is never run.

Shapes: B batch, D features.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from trainables.config.models import FOLDER_SCHEME, HUB_SCHEMES
from trainables.errors import ModelError, first_line, first_three
from trainables.models.libraries.interface import (
    DeclaredTaps,
    Layout,
    Library,
    Tap,
    TrainedInput,
    as_arguments,
    check_known,
    installed,
)
from trainables.models.libraries.timm import (
    is_of_transformers,
    source_config,
    source_name,
    source_of,
    use_cache_without_network,
    wordnet_ids,
)
from trainables.notices import notice

if TYPE_CHECKING:
    from torch import Tensor, nn

    from trainables.models.weight_files import Candidate

LOGITS = "ForImageClassification"
"""The class name suffix of a transformers model with a classifier."""
TWO_LABELS = {"0": "LABEL_0", "1": "LABEL_1"}
"""The default labels, which transformers leaves out of its configs."""
FILTERS = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")
"""Pillow's resize filters, by number."""
DEFAULT_SIZE = 224
NO_CROP_SIZE = 384
"""From this size on, transformers' ConvNeXt processor ignores `crop_pct` and does not crop."""


class Family(NamedTuple):
    """Where the models of a family have their features."""

    num_prefix_tokens: int = 0
    """The number of class tokens before the patch tokens; the config has that of register tokens."""
    has_positions: bool = False
    """Whether the model has a position table, which it interpolates for other image sizes."""
    stages: str | None = None
    """The module list whose outputs are the stages' maps."""
    pooler: str | None = None
    """The module that computes the features, but is not used by the classifier."""


_VIT, _CNN = Family(1, has_positions=True), Family(stages="encoder.stages")
FAMILIES: dict[str, Family] = {
    **dict.fromkeys(("vit", "vit_msn", "beit", "dinov2", "dinov2_with_registers"), _VIT),
    **dict.fromkeys(("convnext", "convnextv2", "resnet", "regnet"), _CNN),
    **dict.fromkeys(("swin", "swinv2", "mobilenet_v2", "efficientnet", "poolformer", "pvt_v2"), Family()),
    "deit": Family(2, has_positions=True),
    "ijepa": Family(has_positions=True),
    "clip_vision_model": Family(1, has_positions=True, pooler="post_layernorm"),
    "siglip_vision_model": Family(has_positions=True, pooler="head"),
    "dinov3_vit": Family(1),
    "dinov3_convnext": Family(1, stages="model.stages"),
}
"""Supported `model_type`s of config.json (of its `vision_config` for image-text models). Others may have other outputs."""


class HuggingFace(Library):
    """Features are `pooler_output`, or else the class token, or else the mean of the last tokens. ViT and DeiT are built without
    a pooler, as most of their files have none."""

    name = "transformers"
    modules = "transformers."
    has_hub = True

    def find(self, name: str) -> str | None:
        """Read the config.json of a folder or repository."""
        if not name.startswith((FOLDER_SCHEME, *HUB_SCHEMES)):
            return None
        kind = _vision(source_config(source_name(name))).get("model_type")
        if kind not in FAMILIES:
            raise ModelError(f"model {name} is a transformers {kind}; choose one of {', '.join(FAMILIES)}")
        if not installed("transformers"):
            raise ModelError(f"model {name} needs transformers, which is not installed: `pip install raydistill[transformers]`")
        return source_name(name)

    def create(self, name: str, num_classes: int, image_size: int, kwargs: Mapping[str, Any]) -> nn.Module:
        transformers = _transformers()
        saved = source_config(name)
        config, options = transformers.CONFIG_MAPPING[saved["model_type"]].from_dict(dict(saved)), {}
        auto = transformers.AutoModelForImageClassification
        vision = getattr(config, "vision_config", config)
        if unknown := [key for key in kwargs if not hasattr(vision, key)]:
            raise TypeError(f"{type(vision).__name__} has no {unknown[0]}")
        for key, value in kwargs.items():
            setattr(vision, key, value)
        if num_classes == 0:
            auto, config = transformers.AutoModel, vision
            options = {"add_pooling_layer": False} if config.model_type in ("vit", "deit") else {}
        elif type(config) not in transformers.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING:
            raise ModelError(
                f"{name} is a {config.model_type}, for which transformers has no classifier: choose another model, or the recipe "
                "`backbone`, which needs none"
            )
        else:
            config.num_labels = num_classes
        model: nn.Module = auto.from_config(config, dtype="float32", **options)
        _prepare(model, num_classes)
        return model

    def constructor(self, name: str, num_classes: int, image_size: int, kwargs: Mapping[str, Any]) -> list[str]:
        if not num_classes:
            raise ModelError(f"transformers has no class that returns the features of {name}: write --to onnx or torch_export")
        repository, revision = source_of(name)
        options = as_arguments({"num_labels": num_classes, **({"revision": revision} if revision else {}), **kwargs})
        return [
            "import transformers",
            f"config = transformers.AutoConfig.from_pretrained({repository!r}{options})",
            "model = transformers.AutoModelForImageClassification.from_config(config)",
            "model.register_forward_hook(lambda module, images, output: output.logits)",
        ]

    def published(self, name: str, weights: str, image_size: int, kwargs: Mapping[str, Any]) -> nn.Module:
        source = _source(name, weights)
        model = self.create(source, _record(source).num_classes, image_size, kwargs)
        repository, revision = source_of(source)
        try:
            use_cache_without_network()
            state, found = _loaded(model, repository, revision=revision or "main", ignore_mismatched_sizes=True)
        except Exception as error:  # any way in which the network, the hub's client or the disk can fail
            raise ModelError(
                f"{source} could not be loaded as a {type(model).__name__} ({first_line(error)}): download all of its files on a "
                f"machine with network access, and write {FOLDER_SCHEME}FOLDER"
            ) from None
        if found["missing_keys"]:
            raise ModelError(f"{source} lacks {first_three(sorted(found['missing_keys']))}: use a complete copy of its weights")
        if other_shapes := sorted(name for name, *_ in found["mismatched_keys"]):
            raise ModelError(
                f"{source}: its config.json gives other shapes to {first_three(other_shapes)}: use the config.json that was "
                "saved with these weights"
            )
        model.load_state_dict(state)
        return model

    def input(self, name: str, weights: str) -> TrainedInput | None:
        if not Path(weights).is_file():
            return _record(_source(name, weights))
        folder = f"{FOLDER_SCHEME}{Path(weights).parent}"
        try:
            if not is_of_transformers(source_config(folder)):
                return None
        except ModelError:  # a file without a config.json
            return None
        return _record(folder)

    def has_fixed_size(self, name: str) -> bool:
        return FAMILIES[_vision(source_config(name))["model_type"]].has_positions

    def name_for_file(self, name: str, path: Path) -> str:
        """Return the file's folder if transformers saved a config there: tensors do not show an activation or an epsilon."""
        return name if self.input(name, str(path)) is None else _of_same_kind(name, f"{FOLDER_SCHEME}{path.parent}")

    def convert(self, model: nn.Module, state: dict[str, Tensor], image_size: int) -> Mapping[str, Tensor]:
        converted, found = _loaded(model, None, state_dict=state)
        return {} if found["missing_keys"] else converted

    def with_own_names(self, model: nn.Module, candidate: Candidate) -> Candidate:
        """Rename tensors saved by older versions, and leave out poolers and text towers."""
        try:
            state, found = _loaded(model, None, state_dict=dict(candidate.tensors))
        except Exception:  # transformers' code on arbitrary tensors: the mismatch message explains more
            return candidate
        if 2 * len(found["missing_keys"]) > len(state):
            return candidate
        left_out = (f"{name.partition('.')[0]}.…" for name in sorted(found["unexpected_keys"]))
        tensors = {name: tensor for name, tensor in state.items() if name not in found["missing_keys"]}
        return candidate._replace(tensors=tensors, others=(*candidate.others, *left_out))


def _transformers() -> Any:
    """Import transformers, with its progress bars and loading reports switched off."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()
    return transformers


def _loaded(model: nn.Module, source: str | None, **options: Any) -> tuple[dict[str, Tensor], Mapping[str, Any]]:
    """Load a state dict through transformers; returns it and the loading report, whose `missing_keys` have random values."""
    build: Any = type(model)
    if getattr(model, "pooler", model) is None:
        options["add_pooling_layer"] = False
    loaded, found = build.from_pretrained(source, config=model.config, dtype="float32", output_loading_info=True, **options)
    return loaded.state_dict(), found


def _prepare(model: Any, num_classes: int) -> None:
    """Hook `model` to return a tensor, interpolate its position table, and pass features through modules that taps can read."""
    from torch import nn

    path = next(path for path, child in model.named_children() if hasattr(child, "config")) if num_classes else ""
    base, prefix = model.get_submodule(path), f"{path}." if path else ""
    family = FAMILIES[base.config.model_type]
    layout = Layout(num_prefix_tokens=family.num_prefix_tokens + getattr(base.config, "num_register_tokens", 0))
    base.last_hidden_state, base.embedding = nn.Identity(), nn.Identity()

    def features(base: Any, args: tuple[Any, ...], output: Any) -> Tensor | None:
        tokens, pooled = base.last_hidden_state(output.last_hidden_state), getattr(output, "pooler_output", None)
        if pooled is None:
            pooled = tokens[:, 0] if layout.num_prefix_tokens else layout.mean(tokens)
        embedding_BD: Tensor = base.embedding(pooled.flatten(1))
        return None if num_classes else embedding_BD

    base.register_forward_hook(features)
    if num_classes:
        model.register_forward_hook(lambda model, args, output: output.logits)
    if "interpolate_pos_encoding" in inspect.signature(base.forward).parameters:
        base.register_forward_pre_hook(
            lambda base, args, options: (args, {**options, "interpolate_pos_encoding": True}), with_kwargs=True
        )
    for name, parameter in model.named_parameters():
        unread = num_classes and family.pooler and name.startswith(f"{prefix}{family.pooler}.")
        if unread or name.endswith("mask_token"):  # read only by masked-image pretraining
            parameter.requires_grad_(False)
    ends = list(base.get_submodule(family.stages)) if family.stages else []
    model.num_classes = num_classes
    model.declared_taps = DeclaredTaps(
        f"{prefix}embeddings" if family is _CNN else None,
        [f"{prefix}{family.stages}.{index}" for index in range(len(ends))],
        f"{prefix}last_hidden_state",
        layout,
        Tap(f"{prefix}embedding"),
    )


def _source(name: str, weights: str) -> str:
    """Return the folder or repository of `weights`; `DEFAULT` is the model's own. Raises ModelError: it is neither."""
    if weights.startswith(HUB_SCHEMES):
        return _of_same_kind(name, source_name(weights))
    check_known(name, weights, ["DEFAULT"])
    return name


def _of_same_kind(name: str, source: str) -> str:
    kind, wanted = (_vision(source_config(each)).get("model_type") for each in (source, name))
    if kind != wanted:
        raise ModelError(f"{source} is a {kind}, not a {wanted}: write it as the model, or choose other weights")
    return source


def _vision(config: Any) -> Mapping[str, Any]:
    """Return the vision part of a config.json."""
    vision = config.get("vision_config")
    return {"model_type": f"{config.get('model_type')}_vision_model", **vision} if isinstance(vision, dict) else config


def _record(source: str) -> TrainedInput:
    """Return the image preprocessing and classes of a folder or repository. Raises ModelError: it has no transformers config."""
    config = source_config(source)
    if not is_of_transformers(config):
        raise ModelError(f"{source} is not a transformers model")
    architectures = config.get("architectures")
    is_classifier = str(architectures).endswith(f"{LOGITS}']")
    labels = config.get("id2label", TWO_LABELS if is_classifier else {}) if is_classifier or not architectures else {}
    if not isinstance(labels, dict):
        raise ModelError(f'{source}: id2label in its config.json is not a mapping: write {{"0": NAME, "1": NAME, …}}')
    names = tuple(str(labels[key]) for key in sorted(labels, key=int))
    ids = wordnet_ids(len(names)) if names and names[0].startswith("tench") else ()
    if all(name.startswith("LABEL_") for name in names):  # transformers' placeholder names
        names = ()
    images = _image_processor(source)
    resized = images.get("size") if images.get("do_resize", True) else None
    size = _side(source, resized) or _side(source, _vision(config).get("image_size")) or DEFAULT_SIZE
    is_cropped = images.get("do_center_crop", "crop_size" in images)
    crop_pct = images.get("crop_pct") or 1
    resize = int(size / crop_pct) if size < NO_CROP_SIZE else size
    return TrainedInput(
        (_side(source, images.get("crop_size")) if is_cropped else None) or size,
        *_normalization(source, images),
        len(labels),
        resize if resized else None,
        dict(enumerate(FILTERS)).get(images.get("resample", -1), "bilinear"),
        names,
        ids,
    )


def _normalization(source: str, images: Mapping[str, Any]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the mean and deviation of pixels in [0, 1] with which a processor prepares pixels in 0 … 255; () without them.

    Raises ModelError: it reverses the channels.
    """
    if images.get("do_flip_channel_order"):
        raise ModelError(
            f"{source} takes BGR images (do_flip_channel_order in its preprocessor_config.json), and models here get RGB: "
            "reverse the input channels of its first convolution, and write false there"
        )
    mean, std = (images.get("image_mean"), images.get("image_std")) if images.get("do_normalize", True) else (0.0, 1.0)
    if mean is None or std is None:
        return (), ()
    means, stds = (value if isinstance(value, list) else [value] * 3 for value in (mean, std))
    if images.get("include_top"):  # EfficientNet's processor divides by the deviation twice
        stds = [value**2 for value in stds]
    white = 255 * images.get("rescale_factor", 1 / 255) if images.get("do_rescale", True) else 255
    offset = 1 if images.get("rescale_offset") else 0
    return tuple((value + offset) / white for value in means), tuple(value / white for value in stds)


def _image_processor(source: str) -> Mapping[str, Any]:
    """Return the image processor's settings; empty if the folder or repository has none."""
    for file in ("preprocessor_config.json", "processor_config.json"):
        try:
            images = source_config(source, file)
        except ModelError:
            continue
        if isinstance(images, dict):
            found: Mapping[str, Any] = images.get("image_processor", images)
            return found
    return {}


def _side(source: str, size: Any) -> int | None:
    """Return the side of a square from a number, a list of two or a dictionary, as `source` records it; None if absent.

    A notice tells what is not a square. Raises ModelError: it is not a number.
    """
    sides = size
    if isinstance(size, dict):
        edge = size.get("shortest_edge") or size.get("longest_edge")
        sides = [size["height"], size.get("width")] if size.get("height") else edge
        if edge and not size.get("shortest_edge"):
            notice(f"{source}: it was trained on images whose longer side has {edge} pixels; here they are squares of that side")
    side, *other = sides if isinstance(sides, list) and sides else [sides]
    if side is None:
        return None
    if not isinstance(side, int) or side < 1:
        raise ModelError(f"{source}: the image size {size!r} in its JSON files is not a number of pixels; write one, such as 224")
    if other and other[0] not in (side, None):
        notice(f"{source}: it was trained on images of {side} × {other[0]} pixels; here they are squares of {side}")
    return side
