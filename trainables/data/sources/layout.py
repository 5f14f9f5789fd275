"""Images in a layout that `distill pack` reads, read as they are: WebDataset tars, lists of files, CIFAR, ImageNet's tars.

Shapes: N samples of the split.
"""

import hashlib
import json
import os
import shlex
import weakref
from pathlib import Path
from typing import Any

from trainables.config import DataConfig
from trainables.data.decode import Sample
from trainables.data.interface import Source
from trainables.data.order import Split
from trainables.data.pack.layout_reader import Listing
from trainables.data.pack.readers import READERS
from trainables.errors import DataError

_listings: weakref.WeakValueDictionary[tuple[Path, bool, float | None], Listing] = weakref.WeakValueDictionary()
"""Listings of the sources that are open in this process: to list millions of samples takes minutes, and lists both splits."""


class LayoutSource(Source):
    """One split of a source whose layout is `kind`, a key of READERS. Opening it lists both splits.

    Raises DataError where single samples of the layout cannot be read fast: the line that packs it. Also what the layout's
    reader raises about its files; OSError where disk or network fail.
    """

    def __init__(self, data: DataConfig, root: Path, kind: str, split: Split) -> None:
        path, key = data.path, (root, data.labels, data.val_share)
        reader = READERS[kind](*key)
        if not reader.random_access:
            packed = shlex.quote(f"{path.rstrip('/')}-packed")
            arguments = f"{shlex.quote(path)} {packed}" + ("" if data.labels else " --no-labels")
            raise DataError(
                f"data.path: {path} is {kind}, which cannot be read in random order: run `distill pack {arguments}` "
                f"and write data.path: {packed}; or give a folder with train/CLASS/* and val/CLASS/*"
            )
        self._reader, self._root = reader, root
        try:
            self._listing = _listings.get(key) or reader.listing()
        except DataError as error:
            raise type(error)(f"data.path: {error}") from None
        _listings[key] = self._listing
        self.classes = self._listing.classes
        self._locations, self.labels_N = self._listing.splits[split].locations, self._listing.splits[split].labels_N
        if not len(self):
            instead = "write a data.val_share below 1" if data.val_share == 1 else "give both splits"
            raise DataError(f"data.path: {path} holds no {split} images; {instead}")

    def __getstate__(self) -> dict[str, Any]:
        """Without the other split, whose samples a loader process has no use for."""
        return {**vars(self), "_listing": None}

    def name(self, index: int) -> str:
        return self._reader.name(self._locations[index])

    def read(self, index: int) -> Sample:
        return self._reader.read_one(self._locations[index])

    def sizes_sha256(self) -> str:
        files = {location if isinstance(location, str) else location[0] for location in self._locations}
        try:
            sizes = [os.stat(os.path.join(self._root, file)).st_size for file in sorted(files)]
        except OSError as error:
            raise DataError(f"data.path: {error.filename} cannot be read: {error.strerror}") from None
        return hashlib.sha256(json.dumps([list(self._locations), sizes]).encode()).hexdigest()
