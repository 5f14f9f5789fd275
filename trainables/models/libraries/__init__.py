"""The model libraries, in lookup order. Importing this module does not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainables.models.libraries.huggingface import HuggingFace
from trainables.models.libraries.interface import Library
from trainables.models.libraries.ours import Ours
from trainables.models.libraries.own_file import OwnFile
from trainables.models.libraries.timm import Timm
from trainables.models.libraries.torchvision import Torchvision

if TYPE_CHECKING:
    from torch import nn

LIBRARIES: dict[str, Library] = {library.name: library for library in (OwnFile(), Ours(), Torchvision(), Timm(), HuggingFace())}


def library_of_class(model: nn.Module) -> Library:
    """Return the library of a model's class, ours for a class of none."""
    module = type(model).__module__
    return next((library for library in LIBRARIES.values() if module.startswith(library.modules)), LIBRARIES["ours"])
