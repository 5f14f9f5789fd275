"""What a library of models is for this project: its names, its models, its published weights and where its models are read.

Importing this costs no torch.

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
"""The line with which torchvision and timm register a model."""


WORDNET_ID = re.compile(r"n\d{8}")


class TrainedInput(NamedTuple):
    """The record that weights come with: how images were prepared, as keys of `data`, and the classes."""

    image_size: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    num_classes: int
    """0: the weights have no classifier."""
    val_resize: int | None = None
    interpolation: str = "bilinear"
    """PyTorch's name of the filter with which they were resized: bilinear, bicubic, nearest …."""
    categories: tuple[str, ...] = ()
    """Published names of the classes in label order, synonyms separated by ", "; () where there are none."""
    wordnet_ids: tuple[str, ...] = ()
    """The ids of ImageNet's classes, in label order; () where they are not known."""


class BlockEnd(NamedTuple):
    """Where a block ends, as paths inside it."""

    preact: str
    """What its last activation reads, as `relu:in`; empty: the block ends without an activation, and its output is meant."""
    norm: str | None = None
    """The last norm on the main branch, or what ends with it; None: there is none."""


def as_is(value: Tensor) -> Tensor:
    return value


def first_token(tokens_BND: Tensor) -> Tensor:
    return tokens_BND[:, 0]


@dataclass(frozen=True)
class Layout:
    """How a model holds its maps."""

    channels_last: bool = False
    """As (B, H, W, C)."""
    num_prefix_tokens: int = 0
    """Class and register tokens before those of the positions, where it holds tokens (B, N, C)."""

    def map(self, value: Tensor) -> Tensor:
        """(B, C, H, W); what is neither a map nor the tokens of a square is returned as it is."""
        if value.ndim == 3:
            patches_BNC = value[:, self.num_prefix_tokens :]
            side = math.isqrt(patches_BNC.shape[1])
            return patches_BNC.transpose(1, 2).unflatten(2, (side, side)) if side**2 == patches_BNC.shape[1] > 0 else value
        return value.permute(0, 3, 1, 2) if self.channels_last and value.ndim == 4 else value

    def mean(self, value: Tensor) -> Tensor:
        """The mean of a map, (B, C)."""
        return self.map(value).mean((2, 3))


class Tap(NamedTuple):
    path: str
    """The path of a module, for its output, with `:in` for its input; empty: the model's output."""
    read: Callable[[Tensor], Tensor] = as_is
    """From the value there to the tap's."""
    what: str = ""
    """What of the value there it is, in a list of taps; empty: all of it."""


class DeclaredTaps(NamedTuple):
    """Where a model is read: paths as in `Tap`."""

    stem: str | None = None
    stages: Sequence[str] = ()
    map: str | None = None
    """The last map, or its tokens after the final norm."""
    layout: Layout = Layout()
    """How stem, stages and map are stored."""
    embedding: Tap | None = None
    """The features of an image, (B, D); None: the mean of the map."""
    preacts: Sequence[str] = ()
    """For each stage the value before its last activation; empty: as `blocks` says."""
    blocks: Mapping[str, BlockEnd] = {}
    """Class, with its module → how a block ends. Others end with an activation in a Sequential, or are not known."""


class Library(ABC):
    """Models by name. Nothing heavy is imported before a model or a record is asked for."""

    name: ClassVar[str]
    has_hub: ClassVar[bool] = False
    """Whether it reads repositories of the Hugging Face Hub."""

    @abstractmethod
    def names(self) -> Collection[str]:
        """Its classifiers, in the order in which a message lists them; empty where it is not installed."""

    def find(self, name: str) -> str | None:
        """Its own name of the model that a user calls `name`; None: it has none. Raises ModelError: it is meant, and has none."""
        return name if name in self.names() else None

    @abstractmethod
    def create(self, name: str, num_classes: int, image_size: int, kwargs: Mapping[str, Any]) -> nn.Module:
        """A model with random parameters, from torch's generator. `kwargs`: what else its constructor gets.

        With 0 classes it has no classifier, its output is the pooled features (B, D), and its `num_classes` is 0.

        Raises ModelError: 0 classes for a model that ends with something else than a linear layer. Raises what the library does
        for an image size it refuses.
        """

    @abstractmethod
    def published(self, name: str, weights: str, image_size: int, kwargs: Mapping[str, Any]) -> nn.Module:
        """A model with its published weights and all of their classes, from the library's cache or downloaded.

        Raises ModelError: no such weights, a failed download, or images of a wrong size.
        """

    @abstractmethod
    def input(self, name: str, weights: str) -> TrainedInput | None:
        """The record of published weights, or of the folder that a file of weights is in; None where there is none.

        Raises ModelError: no such weights.
        """

    @abstractmethod
    def has_fixed_size(self, name: str) -> bool:
        """Whether a model has other parameters for images of another size."""

    def constructor(self, name: str, num_classes: int, image_size: int, kwargs: Mapping[str, Any]) -> list[str]:
        """Lines of Python that build `model` as `create` does. Those of ours and of a user's file need this package.

        Raises ModelError: the library has none for features.
        """
        full_name = with_arguments(name, kwargs)
        build = f"construct({full_name!r}, num_classes={num_classes}, image_size={image_size}, seed=0)"
        return ["from trainables.models.registry import construct", f"model = {build}"]

    def default_size(self, name: str) -> int | None:
        """Height and width of the images that a model is made for; None: the library does not say."""
        return record.image_size if (record := self.input(name, "DEFAULT")) else None

    @abstractmethod
    def owns(self, model: nn.Module) -> bool:
        """Whether the model's class is of this library."""

    @abstractmethod
    def taps(self, model: nn.Module) -> DeclaredTaps:
        """Where a model that it owns is read."""

    def convert(self, model: nn.Module, state: dict[str, Tensor], image_size: int) -> Mapping[str, Tensor]:
        """Weights with other names, or for another image size, as the library converts them; empty: it does not."""
        return {}

    def with_own_names(self, model: nn.Module, candidate: Candidate) -> Candidate:
        """A file's tensors by their names in the model, where the library changes names from version to version."""
        return candidate

    def name_for_file(self, name: str, path: Path) -> str:
        """The model's name, or one that says how the file of weights `path` is to be built. Raises ModelError."""
        return name

    def rescales_input(self, name: str, path: Path) -> bool:
        """Whether the model rescales its input with the weights of this file, which is not one of ours."""
        return False


def as_arguments(kwargs: Mapping[str, Any]) -> str:
    """`, key=value` of each, as Python writes them."""
    return "".join(f", {key}={value!r}" for key, value in kwargs.items())


def check_known(name: str, weights: str, known: Sequence[str], *others: str) -> None:
    """Refuse weights that are neither `known`, which a message may list, nor one of the `others`."""
    if weights not in (*known, *others):
        there_are = f"there are: {', '.join(known) if known else 'none'}; or give a file's path"
        raise ModelError(f"{name} has no weights {weights!r}; {did_you_mean(weights, known, there_are)}")


def installed(package: str) -> bool:
    """Whether `package` can be imported, without importing it."""
    return importlib.util.find_spec(package) is not None


def registered(package: str) -> tuple[str, ...]:
    """Sorted names of the installed package's classifiers; empty where it is not installed."""
    spec = importlib.util.find_spec(package)
    return _registered(spec.origin) if spec is not None and spec.origin else ()


@cache
def _registered(package_file: str) -> tuple[str, ...]:
    """Read from the sources, in milliseconds: importing torchvision takes seconds. Its subfolders hold detectors and the like."""
    sources = (Path(package_file).parent / "models").glob("*.py")
    return tuple(sorted({name for source in sources for name in _REGISTERED.findall(source.read_text(encoding="utf-8"))}))
