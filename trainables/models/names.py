"""The names of all models, without importing torch: a wrong name is refused before anything heavy is loaded."""

import importlib.util
import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from trainables.config.models import FOLDER_SCHEME, HUB_SCHEMES
from trainables.errors import ModelError, closest_matches, first_line
from trainables.rundir import expand_home


class Builder(NamedTuple):
    """How a model of ours is built: by a callable (num_classes, image_size, **options) → nn.Module."""

    path: str
    """`module:name` in `trainables.models`."""
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
    # Papers on distillation call these vgg8, vgg13, ResNet50, MobileNetV2…: in torchvision and timm, such names mean models for
    # images of 224 pixels. Those keep their names; `_cifar` says which ones are meant.
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
"""Ours. A hyphen may stand for an underscore."""

TIMM_PREFIX = "timm/"
TIMM_CONFIG = "config.json"
REUSE_SEPARATOR = "+"
"""STUDENT+TEACHER is a student that predicts with the teacher's classifier, see `trainables.models.reused_classifier`."""
REGISTERED = re.compile(r"^@register_model\b.*\n(?:(?!def ).*\n)*?def (\w+)\(", re.MULTILINE)
"""The line with which torchvision and timm register a model."""


class ModelName(NamedTuple):
    """The library of a model, and its name there."""

    library: Literal["ours", "torchvision", "timm", "joined"]
    name: str


def check_model_name(name: str) -> ModelName:
    """The library of the model `name`: ours first, then torchvision, then timm; `timm/NAME` is timm's; `A+B` is two models.

    Imports no torch. Raises ModelError: no such model (with the nearest name that exists), or timm is not installed.
    """
    if REUSE_SEPARATOR in name:
        for part in name.split(REUSE_SEPARATOR):
            check_model_name(part)
        return ModelName("joined", name)
    if name.startswith(TIMM_PREFIX):
        return ModelName("timm", _timm_name(name))
    if name.startswith((FOLDER_SCHEME, *HUB_SCHEMES)):
        return ModelName("timm", _source_name(name))
    if name.replace("-", "_") in MODELS:
        return ModelName("ours", name.replace("-", "_"))
    if name in library_models("torchvision"):
        return ModelName("torchvision", name)
    if name in library_models("timm"):
        return ModelName("timm", name)
    known = [*MODELS, *sorted(library_models("torchvision")), *sorted(library_models("timm"))]
    if "/" in name:
        raise ModelError(f"there is no model {name!r}; for one that timm saved on the Hugging Face Hub write hf-hub:{name}")
    lower = name.lower()
    # A prefix of a name of ours is nearer than any spelling: vgg8 is vgg8_cifar, not vgg11.
    completions = [model for model in MODELS if lower and lower not in MODELS and model.startswith(lower)]
    similar = ([lower] if lower in known else []) + completions or closest_matches(lower, known)
    instead = (
        f"did you mean {' or '.join(similar[:2])}?"
        if similar
        else f"ours are {', '.join(MODELS)}; torchvision's and timm's (timm/NAME) go by their names"
    )
    without_timm = "" if installed("timm") else " (timm's models need `pip install raydistill[timm]`)"
    raise ModelError(f"there is no model {name!r}; {instead}{without_timm}")


def _timm_name(name: str) -> str:
    _check_timm(name)
    model, _, tag = name.removeprefix(TIMM_PREFIX).partition(".")
    models = library_models("timm")
    if model not in models:
        similar = closest_matches(model.lower(), sorted(models))
        raise ModelError(
            f"timm has no model {model!r}; " + (f"did you mean timm/{similar[0]}?" if similar else "see timm.list_models()")
        )
    if tag:
        raise ModelError(f"model {name!r} names weights as well: write model: timm/{model} and, for a teacher, weights: {tag}")
    return model


def _source_name(name: str) -> str:
    """The name of a model with weights, as timm takes it. A folder's config.json is read; nothing is downloaded."""
    _check_timm(name)
    scheme, _, source = name.partition(":")
    if scheme == FOLDER_SCHEME.rstrip(":"):
        architecture(read_folder_config(expand_home(source)), source)
        return f"{FOLDER_SCHEME}{expand_home(source)}"
    if source.startswith(TIMM_PREFIX) and source.removeprefix(TIMM_PREFIX).partition(".")[0] in library_models("timm"):
        return _timm_name(source)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+(@[\w./-]+)?", source):
        raise ModelError(f"model {name!r} is no repository of the Hugging Face Hub: write hf-hub:OWNER/NAME")
    return f"hf-hub:{source}"


def read_folder_config(folder: Path) -> Any:
    """The config.json of a folder that timm has saved. Raises ModelError: it cannot be read."""
    path = folder / TIMM_CONFIG
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read ({first_line(error)}): give a folder that timm has saved") from None


def architecture(config: Any, source: str) -> str:
    """timm's name of the model that a config.json describes. Raises ModelError: it is not timm's."""
    model = config.get("architecture") if isinstance(config, dict) else None
    if model in library_models("timm"):
        return str(model)
    if isinstance(config, dict) and ("model_type" in config or "architectures" in config):
        what = f"a {config.get('model_type', 'model')} of Hugging Face transformers, not timm's"
    else:
        what = f"no model that timm knows (architecture {model!r} in its {TIMM_CONFIG})"
    raise ModelError(f"{source} is {what}: write one that timm has saved, or the model's name and a state dict as its weights")


def _check_timm(name: str) -> None:
    if not installed("timm"):
        raise ModelError(f"model {name!r} needs timm, which is not installed: `pip install raydistill[timm]`")


def installed(package: str) -> bool:
    """Whether `package` can be imported, without importing it."""
    return importlib.util.find_spec(package) is not None


def library_models(package: Literal["torchvision", "timm"]) -> frozenset[str]:
    """Names of the installed package's classifiers; empty where it is not installed."""
    spec = importlib.util.find_spec(package)
    return _registered(spec.origin) if spec is not None and spec.origin else frozenset()


@cache
def _registered(package_file: str) -> frozenset[str]:
    """Read from the sources, in milliseconds: importing torchvision takes seconds. Its subfolders hold detectors and the like."""
    sources = (Path(package_file).parent / "models").glob("*.py")
    return frozenset(name for source in sources for name in REGISTERED.findall(source.read_text(encoding="utf-8")))
