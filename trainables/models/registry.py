"""Models by name, with a head of the right size, initialised as a function of name and seed only.

Importing this does not import torch, so that the driver can check a name at once (`check_model_name`).

Shapes: B batch, C channels, H W pixels, K classes.
"""

from __future__ import annotations

import json
import pkgutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainables.config.models import FOLDER_SCHEME, HUB_SCHEMES
from trainables.errors import ModelError, first_line
from trainables.models.forward import dry_forward, logits_and_aux, seeded
from trainables.models.names import (
    MODELS,
    TIMM_CONFIG,
    ModelName,
    architecture,
    check_model_name,
    read_folder_config,
)

if TYPE_CHECKING:
    from torch import nn

__all__ = ["MODELS", "build_model", "check_forward", "check_model_name", "construct", "library_options"]

USUAL_SIZES = (8, 16, 32, 64, 75, 96, 128, 160, 192, 224, 256, 299, 384, 448, 512)


def build_model(name: str, *, num_classes: int, image_size: int, seed: int) -> nn.Module:
    """A freshly initialised model on the CPU in float32 that takes (B, 3, image_size, image_size) and can be trained on it.

    Initial parameters are a pure function of (name, num_classes, seed), and of image_size where the architecture is; torch's
    generators stay as they are. Raises ModelError: no such model, or it does not take images of this size, in one line.
    """
    model = construct(name, num_classes=num_classes, image_size=image_size, seed=seed)
    check_forward(model, image_size, num_classes, name=name, training=True)
    return model


def construct(name: str, *, num_classes: int, image_size: int, seed: int) -> nn.Module:
    """`build_model` without its forward checks."""
    found = check_model_name(name)
    if found.library == "joined":
        from trainables.models.reused_classifier import build_reused

        part = partial(construct, num_classes=num_classes, image_size=image_size, seed=seed)
        return build_reused(name, part, image_size=image_size, seed=seed)
    with seeded(f"{found.library}/{found.name}:{num_classes}:{seed}"):
        try:
            model = _construct(found, num_classes, image_size)
        except (AssertionError, RuntimeError, TypeError, ValueError) as error:
            message = f"model {name} cannot be built for images of {image_size}×{image_size} ({first_line(error)})"
            raise ModelError(f"{message}: set data.image_size to what it takes, often 224, or choose another model") from error
    return model


def _construct(found: ModelName, num_classes: int, image_size: int) -> nn.Module:
    model: nn.Module
    if found.library == "ours":
        builder = MODELS[found.name]
        model = pkgutil.resolve_name(f"trainables.models.{builder.path}")(num_classes, image_size, **builder.options)
    elif found.library == "torchvision":
        import torchvision

        options = library_options(found, image_size)
        if found.name in ("googlenet", "inception_v3"):
            options["init_weights"] = True
        model = torchvision.models.get_model(found.name, weights=None, num_classes=num_classes, **options)
    else:
        import timm

        model = timm.create_model(found.name, num_classes=num_classes, **library_options(found, image_size))
    return model


def library_options(found: ModelName, image_size: int) -> dict[str, Any]:
    """The constructor arguments of a library's model that depend on the image size: models with a position table have some."""
    if found.library == "torchvision":
        if found.name.startswith("vit_"):
            return {"image_size": image_size}
        return {"input_size": (image_size, image_size)} if found.name.startswith("maxvit_") else {}
    if found.library == "timm":
        import timm

        published = timm.get_pretrained_cfg(timm_architecture(found.name))
        own_size = published.input_size[-1] if published is not None and ":" not in found.name else None
        if published is not None and published.fixed_input_size and own_size != image_size:
            return {"img_size": image_size}
    return {}


def timm_architecture(name: str) -> str:
    """timm's name of an architecture, also of a folder or a repository (`source_config`). Raises ModelError."""
    return architecture(source_config(name), name) if name.startswith((FOLDER_SCHEME, *HUB_SCHEMES)) else name


def timm_folder_of(path: Path) -> str | None:
    """`local-dir:` with the folder of a file of weights; None where timm has not saved it: many programs write a config.json."""
    folder = f"{FOLDER_SCHEME}{path.parent}"
    try:
        timm_architecture(folder)
    except ModelError:
        return None
    return folder


def source_config(name: str) -> Any:
    """The config.json of a folder or a repository, which is downloaded once. Raises ModelError: it is not there."""
    if name.startswith(FOLDER_SCHEME):
        return read_folder_config(Path(name.removeprefix(FOLDER_SCHEME)))
    repository, _, revision = name.partition(":")[2].partition("@")
    try:
        from huggingface_hub import hf_hub_download

        return json.loads(Path(hf_hub_download(repository, TIMM_CONFIG, revision=revision or None)).read_text(encoding="utf-8"))
    except Exception as error:  # any way in which the network, the hub's client or the disk can fail
        raise ModelError(
            f"{name}: its {TIMM_CONFIG} could not be loaded from the Hugging Face Hub ({first_line(error)}): fetch the "
            f"repository where there is a network, and write {FOLDER_SCHEME}FOLDER"
        ) from None


def check_forward(model: nn.Module, image_size: int, num_classes: int, *, name: str = "", training: bool = False) -> None:
    """Refuse a model that does not turn (2, 3, image_size, image_size) into (2, num_classes), and where `training` can not be
    trained on it either.

    Takes a fraction of a second for any model. Parameters, batch statistics and generators stay as they are.

    Raises ModelError: with the nearest usual size that works.
    """
    named = f"model {name or type(model).__name__}"
    modes = (False, True) if training else (False,)
    for mode in modes:
        try:
            shape = _output_shape(model, image_size, mode)
        except (AssertionError, IndexError, RuntimeError, TypeError, ValueError) as error:
            does = "cannot be trained on" if mode else "does not take"
            sizes = sorted(USUAL_SIZES, key=lambda size: (abs(size - image_size), size))
            fits = next((size for size in sizes if size != image_size and _takes(model, size, modes)), None)
            instead = f"set data.image_size to {fits}, or choose another model" if fits else "choose another model"
            raise ModelError(f"{named} {does} images of {image_size}×{image_size} ({first_line(error)}): {instead}") from error
        if shape != (2, num_classes):
            returns = f"returns shape {shape} for a batch of 2, not (2, {num_classes})"
            raise ModelError(f"{named} {returns}: it is no classifier; choose another model")


def _output_shape(model: nn.Module, image_size: int, training: bool) -> tuple[int, ...]:
    return tuple(logits_and_aux(dry_forward(model, image_size, training=training))[0].shape)


def _takes(model: nn.Module, image_size: int, modes: Sequence[bool]) -> bool:
    try:
        for training in modes:
            _output_shape(model, image_size, training)
    except (AssertionError, IndexError, RuntimeError, TypeError, ValueError):
        return False
    return True
