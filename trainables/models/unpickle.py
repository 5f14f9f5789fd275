"""Files of torch.save, read without running code from them."""

from __future__ import annotations

import pickle
import re
import tarfile
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch

from trainables.errors import CheckpointError, first_line

MOST_GROWTH = 2
"""torch.save compresses nothing: a file whose content is larger than so many times itself would fill the memory."""
SAVE_AGAIN = "in the program that wrote it, save only the parameters: torch.save(model.state_dict(), path)"


class IgnoredValue:
    """Replaces a value that is neither a tensor nor plain: its content is dropped, and none of its code runs."""

    def __new__(cls, *_args: Any, **_kwargs: Any) -> IgnoredValue:
        return super().__new__(cls)

    def __setstate__(self, state: Any) -> None:
        """Drop the content."""


IGNORED_TYPES = (
    "argparse.Namespace",  # RepDistiller's `opt`, in its *_last.pth
    "numpy._core.multiarray.scalar",  # an accuracy or a rate that numpy computed
    "numpy.core.multiarray.scalar",  # the same before numpy 2
    "numpy.dtype",
)
"""Types that training scripts save besides the parameters, and that `IgnoredValue` replaces: the real ones would be built from
the file's bytes, and a dtype or a scalar with forged bytes can reach any memory."""


def load_torch_file(path: Path) -> Any:
    """The content of a file of torch.save: tensors, plain values, and `IgnoredValue` for IGNORED_TYPES.

    Raises CheckpointError: the file has anything else, which could run code, or is damaged.
    """
    _check_unpacked_size(path)
    try:
        with torch.serialization.safe_globals([(IgnoredValue, name) for name in IGNORED_TYPES]), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a pickle protocol other than torch's: the errors below explain it
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        blocked = re.search(r"GLOBAL (\S+)", str(error))
        reason = f"it has {blocked[1]}" if blocked else "it is no file of torch.save, or was cut off"
        raise CheckpointError(
            f"{path} is not loaded, since it has more than tensors, which could run code, or is damaged ({reason}): {SAVE_AGAIN}"
        ) from None
    except Exception as error:  # the unpickler reads any bytes, and may fail in any way
        if path.is_file() and path.stat().st_size and tarfile.is_tarfile(path):
            raise CheckpointError(f"{path} is a tar archive: unpack it and give the file of one model in it") from None
        known = isinstance(error, EOFError | OSError | RuntimeError | ValueError)  # others have no useful message
        reason = first_line(error) if known else "it is no file of torch.save"
        raise CheckpointError(f"{path} cannot be read ({reason}): it was cut off or damaged; use another copy") from None


def _check_unpacked_size(path: Path) -> None:
    if not zipfile.is_zipfile(path):  # a damaged or an old file, which `torch.load` judges
        return
    with zipfile.ZipFile(path) as archive:
        unpacked, packed = sum(member.file_size for member in archive.infolist()), path.stat().st_size
    if unpacked > MOST_GROWTH * packed:
        raise CheckpointError(f"{path} is compressed, {packed:,} bytes that become {unpacked:,}: {SAVE_AGAIN}")
