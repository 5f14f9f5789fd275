"""A folder of images: ROOT/train/CLASS/* and ROOT/val/CLASS/* (or validation, or test), as torchvision's ImageFolder reads it.

Shapes: N samples of the split.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from typing import NamedTuple, NoReturn

import numpy as np

from trainables.data.decode import UnreadableImageError, read_file
from trainables.data.interface import Source, sha256_of_names
from trainables.data.order import Split
from trainables.errors import DataError

VAL_FOLDERS = ("val", "validation", "test")
# torchvision.datasets.folder.IMG_EXTENSIONS, compared without case
EXTENSIONS = (".jpg", ".jpeg", ".png", ".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp")
SAMPLED = 256
"""Files whose contents a fingerprint reads. Of images preprocessed anew nearly all change, so that a few tell; to open a million
on a network disk takes minutes."""
_KINDS = " ".join(EXTENSIONS)
_LAYOUT = "a folder with train/CLASS/* and val/CLASS/*"


class FolderSource(Source):
    """One split of an image folder; classes and samples in ImageFolder's order, so that published weights fit.

    Classes are the folders of `train`, sorted. A validation folder may lack some of them, and may not have others.
    Files without an image's extension are left out. Raises DataError where a folder is missing, unreadable or empty, or is a
    link to one that it lies in.
    """

    def __init__(self, path: str, split: Split) -> None:
        root = os.path.expanduser(path)
        if not os.path.isdir(root):
            what = "is a file" if os.path.exists(root) else "does not exist"
            raise DataError(f"data.path: {path} {what}; write digits, synthetic, or {_LAYOUT}")
        train = os.path.join(root, "train")
        if not os.path.isdir(train):
            raise DataError(f"data.path: {path} has no folder train; images belong in train/CLASS/ and val/CLASS/")
        self.classes = tuple(_folders(train))
        if not self.classes:
            raise DataError(f"data.path: {train} has no class folders; images belong in train/CLASS/")
        self._root = root
        self._folder = "train" if split == "train" else _validation_folder(root, path)
        in_split = self.classes if split == "train" else self._classes_of_validation()

        self._files: list[str] = []  # relative to the split's folder, so that a million of them stay small
        labels: list[int] = []
        for label, name in enumerate(self.classes):
            files = list(_images(os.path.join(root, self._folder), name)) if name in in_split else []
            if not files and split == "train":
                raise DataError(f"data.path: {os.path.join(train, name)} holds no images ({_KINDS}); add some or remove it")
            self._files += files
            labels += [label] * len(files)
        if not self._files:
            raise DataError(f"data.path: {os.path.join(root, self._folder)} holds no images ({_KINDS})")
        self.labels_N = np.array(labels, dtype=np.int64)

    def name(self, index: int) -> str:
        """The file's path inside the data folder, printable whatever its bytes are."""
        return os.fsencode(os.path.join(self._folder, self._files[index])).decode(errors="replace")

    def files(self) -> list[str]:
        """Every sample's path inside the data folder, as the file system has it."""
        return [f"{self._folder}{os.sep}{file}" for file in self._files]

    def read(self, index: int) -> bytes:
        return read_file(os.path.join(self._root, self._folder, self._files[index]))

    def fingerprint(self) -> str:
        """Of all names and sizes, and of what is in SAMPLED files spread evenly over them: see `Source`.

        Times do not count: nodes may have copies of their own. A single image that another one of the same size replaced may
        not be seen. Raises DataError where a file is gone, or the disk fails.
        """
        digest = hashlib.sha256()
        try:
            for file in self.files():
                size = os.stat(os.path.join(self._root, file)).st_size
                digest.update(b"%d %s\0" % (size, os.fsencode(file)))
        except OSError as error:
            _refuse(error)
        digest.update(sampled_sha256(self))
        return digest.hexdigest()

    def order_sha256(self) -> str:
        return sha256_of_names(self._files)

    def _classes_of_validation(self) -> set[str]:
        folder = os.path.join(self._root, self._folder)
        present = set(_folders(folder))
        if extra := sorted(present - set(self.classes)):
            raise DataError(
                f"data.path: {folder} has classes that train has not: {first_three(extra)}; add them to train or remove them"
            )
        return present


def first_three(names: Sequence[str]) -> str:
    """The first names of a list that may be long, for a message."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def sampled_sha256(source: Source) -> bytes:
    """A hash over what is in SAMPLED files spread evenly over a source's, or in all; where one cannot be read, over why.

    Training skips what it cannot read. Raises DataError where the disk or the network fails.
    """
    digest, count = hashlib.sha256(), min(len(source), SAMPLED)
    for number in range(count):
        try:
            content = bytes(source.read(number * len(source) // count))
        except UnreadableImageError as error:
            content = str(error).encode()
        except OSError as error:
            _refuse(error)
        digest.update(b"%d\0" % len(content))
        digest.update(content)
    return digest.digest()


def _validation_folder(root: str, path: str) -> str:
    for name in VAL_FOLDERS:
        if os.path.isdir(os.path.join(root, name)):
            return name
    raise DataError(f"data.path: {path} has no validation folder; its images belong in val/CLASS/ (or validation, or test)")


def _folders(path: str) -> list[str]:
    """Names of the folders in `path`, sorted."""
    try:
        with os.scandir(path) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir())
    except OSError as error:
        _refuse(error)


class _Folder(NamedTuple):
    """A folder on a walk that follows links."""

    path: str
    real: str
    left: tuple[str, ...] = ()
    """The real paths of the folders whose links were followed to it."""

    def inside(self, name: str) -> _Folder:
        """A folder in this one. Raises DataError where it is a link that leads back: what lies there would never end."""
        path = os.path.join(self.path, name)
        if not os.path.islink(path):
            return _Folder(path, os.path.join(self.real, name), self.left)
        target, left = os.path.realpath(path), (*self.left, self.real)
        if any(os.path.commonpath((target, folder)) == target for folder in left):
            raise DataError(
                f"data.path: {path} is a link to {target}, in which it lies: its images would count again and again; "
                "remove the link"
            )
        return _Folder(path, target, left)


def _walk(folder: _Folder) -> Iterator[tuple[str, list[str]]]:
    """The paths of a folder and of all that are in it, at any depth, and the names of the files in each."""
    waiting = {folder.path: folder}
    for path, names, files in os.walk(folder.path, onerror=_refuse, followlinks=True):
        here = waiting.pop(path)
        for name in names:
            inner = here.inside(name)
            waiting[inner.path] = inner
        yield path, files


def _images(split_folder: str, class_name: str) -> Iterator[str]:
    """Image files under one class, at any depth, relative to the split's folder: by folder, then by name, each sorted."""
    skip = len(split_folder) + 1
    split = _Folder(split_folder, os.path.realpath(split_folder))
    for folder, files in sorted(_walk(split.inside(class_name))):
        below = folder[skip:] + os.sep
        for file in sorted(files):
            if file.lower().endswith(EXTENSIONS):
                yield below + file


def _refuse(error: OSError) -> NoReturn:
    raise DataError(f"data.path: {error.filename} cannot be read: {error.strerror}") from None
