"""The model libraries, in lookup order. Importing this module does not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainables.models.libraries.huggingface import HuggingFace
from trainables.models.libraries.interface import DeclaredTaps, Library
from trainables.models.libraries.ours import Ours
from trainables.models.libraries.own_file import OwnFile
from trainables.models.libraries.timm import Timm
from trainables.models.libraries.torchvision import Torchvision

if TYPE_CHECKING:
    from torch import nn

_ALL = (OwnFile(), Ours(), Torchvision(), Timm(), HuggingFace())
LIBRARIES: dict[str, Library] = {library.name: library for library in _ALL}


def declared_taps(model: nn.Module) -> DeclaredTaps:
    """Return the taps that the library of the model's class declares; other classes may define `declared_taps` themselves."""
    owner = next((library for library in LIBRARIES.values() if library.owns(model)), None)
    declared: DeclaredTaps = owner.taps(model) if owner else getattr(model, "declared_taps", DeclaredTaps)()
    return declared
