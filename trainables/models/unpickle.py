"""Read torch.save files without running code from them."""

from __future__ import annotations

import pickle
import re
import warnings
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import torch

from trainables.errors import CheckpointError, first_line, first_three
from trainables.models.foreign_files import SAVE_AGAIN, refuse_foreign

MAX_GROWTH = 2
"""Maximum ratio of unpacked to packed size. torch.save does not compress, so a larger ratio would only fill the memory."""
MAX_IGNORED = 100
_PICKLE_BYTES = 2**23
"""The first bytes of a file from before torch 1.6 that contain its objects; tensor values come after them."""


class IgnoredValue:
    """Replaces a value that is neither a tensor nor plain: its content is dropped and its code does not run."""

    def __new__(cls, *_args: Any, **_kwargs: Any) -> IgnoredValue:
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        """Drop the content."""


IGNORED_PACKAGES = (
    *("argparse", "datetime", "functools", "pathlib", "typing"),
    *("numpy.core.multiarray", "numpy._core.multiarray", "numpy.dtype", "numpy.dtypes", "numpy.ndarray"),
    *("mmcv", "mmengine", "omegaconf", "torch.optim", "yacs"),
    *("bool", "dict", "float", "getattr", "int", "list", "object", "str", "tuple"),  # the unpickler leaves out builtins
)
"""Packages, or parts of them, of what training scripts save besides parameters: options, histories, schedulers. Their types are
replaced by `IgnoredValue`: the real ones are built from the file's bytes, and a forged dtype or scalar can reach any memory."""
DICTIONARIES = (
    "collections.defaultdict",
    "addict.addict.Dict",
    "mmengine.config.config.ConfigDict",
    "yacs.config.CfgNode",
    "pytorch_lightning.utilities.parsing.AttributeDict",
    "lightning.pytorch.utilities.parsing.AttributeDict",
    "lightning_fabric.utilities.data.AttributeDict",
    "lightning.fabric.utilities.data.AttributeDict",
)
"""Subclasses of dict, which become plain ones."""


class PlainDictionary:
    """Replaces a subclass of dict: without its arguments, such as a factory of values."""

    def __new__(cls, *_args: Any) -> OrderedDict[Any, Any]:  # type: ignore[misc]
        return OrderedDict()


def load_torch_file(path: Path, *, lazily: bool = False) -> Any:
    """Load the content of a torch.save file: tensors, plain values, and `IgnoredValue` for types of IGNORED_PACKAGES.

    With `lazily`, a tensor's values are not read before they are used, except from a file of torch before 1.6.

    Raises CheckpointError: the file has anything else, which could run code, belongs to another library, or is damaged.
    """
    refuse_foreign(path)
    _check_unpacked_size(path)
    ignored: list[str] = []
    while True:  # the unpickler takes exact names, and tells one of them at a time
        replaced: list[Any] = [(IgnoredValue, name) for name in ignored] + [(PlainDictionary, name) for name in DICTIONARIES]
        try:
            with torch.serialization.safe_globals(replaced), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # about another pickle protocol: the errors below explain it
                return torch.load(path, map_location="cpu", weights_only=True, mmap=lazily and zipfile.is_zipfile(path))
        except pickle.UnpicklingError as error:
            blocked = re.search(r"GLOBAL (\S+)", str(error))
            if blocked and _has_module(path):
                reason = f"{path} is a whole pickled model ({blocked[1]}), and loading it would run code"
                raise CheckpointError(f"{reason}: {SAVE_AGAIN}") from None
            if blocked and _is_ignored(blocked[1]) and len(ignored) < MAX_IGNORED:
                ignored.append(blocked[1] if "." in blocked[1] else f"builtins.{blocked[1]}")
                continue
            names = [blocked[1]] if blocked else ignored
            reason = f"it has {first_three(names)}" if names else "it is not a torch.save file, or was truncated"
            raise CheckpointError(
                f"{path} is not loaded: it has more than tensors, which could run code, or it is damaged ({reason}): {SAVE_AGAIN}"
            ) from None
        except Exception as error:  # on arbitrary bytes the unpickler may raise anything
            known = isinstance(error, EOFError | OSError | RuntimeError | ValueError)  # others have no useful message
            reason = first_line(error) if known else "it is not a torch.save file"
            raise CheckpointError(f"{path} cannot be read ({reason}): it is truncated or damaged; use another copy") from None


def _is_ignored(name: str) -> bool:
    return any(f"{name}.".startswith(f"{package}.") for package in IGNORED_PACKAGES)


def _has_module(path: Path) -> bool:
    """Whether the pickle has attributes that every `nn.Module` has."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            pickles = [archive.read(name) for name in archive.namelist() if name.endswith("data.pkl")]
    else:
        with path.open("rb") as file:
            pickles = [file.read(_PICKLE_BYTES)]
    return any(b"_parameters" in content and b"_modules" in content for content in pickles)


def _check_unpacked_size(path: Path) -> None:
    if not zipfile.is_zipfile(path):  # an old or damaged file, which `torch.load` handles
        return
    with zipfile.ZipFile(path) as archive:
        unpacked, packed = sum(member.file_size for member in archive.infolist()), path.stat().st_size
    if unpacked > MAX_GROWTH * packed:
        raise CheckpointError(f"{path} is compressed, {packed:,} bytes that become {unpacked:,}: {SAVE_AGAIN}")
