"""The interface of a model library: model names, constructors, published weights and declared taps.

Importing this module does not import torch.

Shapes: B batch, C channels, D features, H W positions, N tokens.
"""

from __future__ import annotations

import importlib.util
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from trainables.config.models import with_arguments
from trainables.errors import ModelError, did_you_mean

if TYPE_CHECKING:
    from torch import Tensor, nn

    from trainables.models.weight_files import Candidate

_REGISTERED = re.compile(r"^@register_model\b.*\n(?:(?!def ).*\n)*?def (\w+)\(", re.MULTILINE)
"""Matches a function that torchvision or timm registers as a model."""


WORDNET_ID = re.compile(r"n\d{8}")


class TrainedInput(NamedTuple):
    """What published weights record about their training: how images were prepared, as keys of `data`, and the classes."""

    image_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    num_classes: int
    """0 if the weights have no classifier."""
    val_resize: int | None = None
    interpolation: str = "bilinear"
    """PyTorch's name of the resize filter: bilinear, bicubic, nearest …."""
    categories: tuple[str, ...] = ()
    """Published class names in label order, with synonyms separated by ", "; () if there are none."""
    wordnet_ids: tuple[str, ...] = ()
    """WordNet ids of ImageNet classes in label order; () if unknown."""


def as_is(value: Tensor) -> Tensor:
    return value


def first_token(tokens_BND: Tensor) -> Tensor:
    return tokens_BND[:, 0]


@dataclass(frozen=True)
class Layout:
    """The memory layout of a model's feature maps."""

    channels_last: bool = False
    """Whether maps are (B, H, W, C)."""
    num_prefix_tokens: int = 0
    """The number of class and register tokens before the patch tokens, for tokens (B, N, C)."""

    def map(self, value: Tensor) -> Tensor:
        """Convert to (B, C, H, W); anything but a map or the tokens of a square is returned unchanged."""
        if value.ndim == 3:
            patches_BNC = value[:, self.num_prefix_tokens :]
            side = math.isqrt(patches_BNC.shape[1])
            return patches_BNC.transpose(1, 2).unflatten(2, (side, side)) if side**2 == patches_BNC.shape[1] > 0 else value
        return value.permute(0, 3, 1, 2) if self.channels_last and value.ndim == 4 else value

    def mean(self, value: Tensor) -> Tensor:
        """Average a map over its positions, to (B, C)."""
        return self.map(value).mean((2, 3))


class Tap(NamedTuple):
    path: str
    """A module's path for its output, with `:in` for its input; empty for the model's output."""
    read: Callable[[Tensor], Tensor] = as_is
    """Converts the value at `path` to the tap's."""
    what: str = ""
    """The part of the value that the tap reads, as listed by `distill taps`; empty for all of it."""


class DeclaredTaps(NamedTuple):
    """The taps of a model; paths are as in `Tap`."""

    stem: str | None = None
    stages: Sequence[str] = ()
    map: str | None = None
    """The last map, or its tokens after the final norm."""
    layout: Layout = Layout()
    """How stem, stages and map are stored."""
    embedding: Tap | None = None
    """The features of an image, (B, D); None for the mean of the map."""
    preacts: Sequence[str] = ()
    """Path of each stage's value before its last activation; if empty, `blocks.BLOCKS` determines it."""


class Library(ABC):
    """Looks up and builds models by name. Heavy packages are imported only when a model or a record is requested."""

    name: ClassVar[str]
    modules: ClassVar[str]
    """How the modules of its models' classes begin."""
    has_hub: ClassVar[bool] = False
    """Whether it loads repositories from the Hugging Face Hub."""

    def names(self) -> Collection[str]:
        """Return the names of its classifiers in the order to list them; empty if the library is not installed."""
        return ()

    def find(self, name: str) -> str | None:
        """Return the library's own name for `name`, or None if the model is not its own.

        Raises ModelError: `name` refers to this library, which has no such model or is not installed.
        """
        return name if name in self.names() else None

    @abstractmethod
    def create(self, name: str, num_classes: int, image_size: int, kwargs: Mapping[str, Any]) -> nn.Module:
        """Build a model with random parameters from torch's generator. `kwargs` are further constructor arguments.

        With 0 classes it has no classifier, returns the pooled features (B, D), and its `num_classes` is 0.

        Raises ModelError: 0 classes for a model that does not end with a linear layer. For an unsupported image size, the
        library's own exception propagates.
        """

    def published(self, name: str, weights: str, image_size: int, kwargs: Mapping[str, Any]) -> nn.Module:
        """Build a model with published weights and all their classes, from the library's cache or a download.

        Raises ModelError: there are no such weights, the download failed, or they do not take this image size.
        """
        raise ModelError(f"{name} has no published weights {weights!r}: give the path of a checkpoint or of a file with weights")

    def input(self, name: str, weights: str) -> TrainedInput | None:
        """Return the record of published weights, or of a weight file's folder; None if there is none.

        Raises ModelError: there are no such weights.
        """
        return None

    def has_fixed_size(self, name: str) -> bool:
        """Whether the model's parameters depend on the image size."""
        return False

    def constructor(self, name: str, num_classes: int, image_size: int, kwargs: Mapping[str, Any]) -> list[str]:
        """Return lines of Python that build `model` as `create` does. By default they import this package.

        Raises ModelError: the library has no class that returns features.
        """
        full_name = with_arguments(name, kwargs)
        build = f"construct({full_name!r}, num_classes={num_classes}, image_size={image_size}, seed=0)"
        return ["from trainables.models.registry import construct", f"model = {build}"]

    def default_size(self, name: str) -> int | None:
        """Return the image height and width that the model is designed for, or None if the library does not record it."""
        return record.image_size if (record := self.input(name, "DEFAULT")) else None

    def taps(self, model: nn.Module) -> DeclaredTaps:
        """Return the declared taps of a model of a class of this library; by default those that the model itself declares."""
        declared: Any = getattr(model, "declared_taps", DeclaredTaps())
        taps: DeclaredTaps = declared() if callable(declared) else declared
        return taps

    def convert(self, model: nn.Module, state: dict[str, Tensor], image_size: int) -> Mapping[str, Tensor]:
        """Convert weights with other names or for another image size as the library does; empty if it cannot."""
        return {}

    def with_own_names(self, model: nn.Module, candidate: Candidate) -> Candidate:
        """Rename a file's tensors to the installed version's names, for a library that changes names between versions."""
        return candidate

    def name_for_file(self, name: str, path: Path) -> str:
        """Return the name to build the model by for the weight file `path`; by default the model's own. Raises ModelError."""
        return name

    def rescales_input(self, name: str, path: Path) -> bool:
        """Whether the model rescales its input with this weight file, which is not a checkpoint of ours."""
        return False


def as_arguments(kwargs: Mapping[str, Any]) -> str:
    """Format `, key=value` for each argument, as Python source."""
    return "".join(f", {key}={value!r}" for key, value in kwargs.items())


def check_known(name: str, weights: str, known: Sequence[str], *others: str) -> None:
    """Raise ModelError unless `weights` is one of `known`, which the message may list, or of `others`."""
    if weights not in (*known, *others):
        choices = f"choose from {', '.join(known)}, or give a file's path" if known else "give a file's path"
        raise ModelError(f"{name} has no weights {weights!r}; {did_you_mean(weights, known, choices)}")


def installed(package: str) -> bool:
    """Whether `package` can be imported, without importing it."""
    return importlib.util.find_spec(package) is not None


def registered(package: str) -> tuple[str, ...]:
    """Return the sorted names of the package's classifiers; empty if it is not installed."""
    spec = importlib.util.find_spec(package)
    return _registered(spec.origin) if spec is not None and spec.origin else ()


@cache
def _registered(package_file: str) -> tuple[str, ...]:
    """Read the names from the sources in milliseconds: importing torchvision takes seconds. Subfolders have no classifiers."""
    sources = (Path(package_file).parent / "models").glob("*.py")
    return tuple(sorted({name for source in sources for name in _REGISTERED.findall(source.read_text(encoding="utf-8"))}))
