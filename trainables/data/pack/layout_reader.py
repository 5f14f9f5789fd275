"""What a reader of some layout of images gives to the packing and, where single samples can be read, to training.

Shapes: N samples of a split.
"""

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from trainables.data.decode import Sample, UnreadableImageError, read_file
from trainables.data.order import Split
from trainables.data.split_names import PURPOSES, SPLIT_NAMES, SPLIT_WORDS, choose_splits, is_hidden, known_split_names
from trainables.errors import DataError, first_three, printable
from trainables.notices import notice

_WORD = re.compile(r"[a-z]+")
_MAX_DEPTH = 2
"""Folders between a source and its files, such as Hugging Face's CONFIG/SPLIT/0000.parquet."""
LABEL_FIELDS = ("label", "labels", "fine_label", "class", "cls", "target", "category", "class_name", "coarse_label")
"""Names of a column or a field that holds the class, in the order of preference."""

Location = Any
"""Where a reader finds a sample: a path, or a file and a position in it. JSON-like, since it travels and is compared."""
Label = int | str
T = TypeVar("T")


@dataclass(frozen=True)
class SplitListing:
    """One split of a source in its order: where each sample lies, and its label."""

    locations: Sequence[Location]
    labels_N: NDArray[np.int64]


@dataclass(frozen=True)
class Listing:
    """A whole source. Labels are indices into `classes`; `pixels`: samples come as pixels, not as image files."""

    classes: tuple[str, ...]
    splits: Mapping[Split, SplitListing]
    pixels: bool = False


class LayoutReader(ABC):
    """One layout of labelled images on disk, in the folder `root`. Making a reader reads nothing."""

    def __init__(self, root: Path) -> None:
        self._root = root

    @staticmethod
    @abstractmethod
    def matches(root: Path) -> bool:
        """Whether `root` looks like this layout; decided by names, or by a few bytes."""

    @abstractmethod
    def listing(self) -> Listing:
        """Every sample of both splits. Raises DataError where there is none, or labels do not agree."""

    @abstractmethod
    def read(self, locations: Sequence[Location]) -> Iterator[tuple[str, Sample | UnreadableImageError]]:
        """For each location the sample's name, and its content or why that cannot be read.

        Raises OSError where disk or network fail, or a file of many samples has gone: that says nothing of the samples.
        """


class Piece(NamedTuple):
    """Where a sample lies in a file of many: the file's path below the root, and the sample's name in it."""

    file: str
    offset: int
    size: int
    name: str


class RandomAccessReader(LayoutReader):
    """A layout of which single samples are read at no more cost than many, by several threads at once: training reads it too.

    A location is a file's path below the root, or a Piece.
    """

    def name(self, location: str | Piece) -> str:
        """The sample's name for messages, printable whatever its bytes are."""
        return printable(location if isinstance(location, str) else f"{location[0]}/{location[3]}")

    def read_one(self, location: str | Piece) -> Sample:
        """The sample. Raises UnreadableImageError where it cannot be read, OSError where disk or network fail."""
        if isinstance(location, str):
            return read_file(os.path.join(self._root, location))
        file, offset, size, _ = location
        with open(self._root / file, "rb") as opened:
            opened.seek(offset)
            content = opened.read(size)
        if len(content) < size:
            raise UnreadableImageError("truncated")
        return self.decode(content)

    def decode(self, content: bytes) -> Sample:
        """The sample that the bytes of a Piece hold. Raises UnreadableImageError."""
        return content

    def read(self, locations: Sequence[str | Piece]) -> Iterator[tuple[str, Sample | UnreadableImageError]]:
        for location in locations:
            try:
                yield self.name(location), self.read_one(location)
            except UnreadableImageError as error:
                yield self.name(location), error


class Located(NamedTuple):
    """Where the samples of each split lie, and their labels as the source has them."""

    locations: dict[Split, list[Location]]
    labels: dict[Split, list[Label]]


def locate(root: Path, files: Mapping[Split, Sequence[T]], samples: Callable[[T], Iterable[tuple[Location, Label]]]) -> Located:
    """The samples of all files, or other parts of a source, in their order; `samples` gives those of one.

    Samples of the label -1, which means none, are left out with a notice. Raises DataError where no others are left of a split.
    """
    found = Located({"train": [], "val": []}, {"train": [], "val": []})
    for split, parts in files.items():
        num_unlabelled = 0
        for part in parts:
            for location, label in samples(part):
                if label in (-1, "-1"):
                    num_unlabelled += 1
                    continue
                found.locations[split].append(location)
                found.labels[split].append(label)
        if num_unlabelled:
            if not found.labels[split]:
                raise DataError(
                    f"{root}: all {num_unlabelled} {split} samples have the label -1, which means none; give a labelled split"
                )
            notice(f"{root}: {num_unlabelled} {split} samples have the label -1, which means none: they are left out")
    return found


def numbered(
    root: Path,
    located: Located,
    names: Mapping[Label, str] | None = None,
    *,
    text_is_index: bool = False,
    pixels: bool = False,
) -> Listing:
    """The listing with labels 0 … K−1, from whatever a source calls its labels: the sorted values that train has.

    Numbers are sorted as numbers, text as text, as ImageFolder sorts its folders. `text_is_index`: the layout writes indices as
    text, so that the texts 0 … K−1 are the indices themselves. A class's name is what `names` calls it, or else the value.

    Raises DataError for a value that only validation has.
    """
    labels, seen = located.labels, set(located.labels["train"])
    every = seen.union(labels["val"])
    is_index = text_is_index and {str(value) for value in every} == {str(index) for index in range(len(every))}
    if not is_index and any(isinstance(value, str) for value in every):
        labels = {split: [str(label) for label in of_split] for split, of_split in labels.items()}
        values: list[Label] = sorted(set(map(str, seen)))
        if all(str(value).isdecimal() for value in values) and values != sorted(values, key=int):
            shown = ", ".join(map(str, values[:5]))
            notice(f"{root}: classes in the order {shown} … (sorted as text, as ImageFolder sorts its folders)")
    else:
        labels = {split: [int(label) for label in of_split] for split, of_split in labels.items()}
        values = sorted(set(map(int, seen)))
    if unknown := sorted(map(str, set(labels["val"]) - set(values))):
        raise DataError(
            f"{root}: validation has labels that train has not: {first_three(unknown)}; give the two splits of one data set"
        )
    classes = tuple((names or {}).get(value, str(value)) for value in values)
    if len(set(classes)) < len(classes):  # two numbers under one name
        classes = tuple(str(value) for value in values)
    index_of = {value: index for index, value in enumerate(values)}
    labels_N = {split: np.array([index_of[value] for value in of_split], dtype=np.int64) for split, of_split in labels.items()}
    return Listing(classes, splits_of(located, labels_N), pixels)


def splits_of(located: Located, labels: Mapping[Split, NDArray[np.int64]]) -> dict[Split, SplitListing]:
    """Each split's samples with these labels."""
    return {split: SplitListing(located.locations[split], labels[split]) for split in labels}


def unnamed_labels(root: Path, labels: Sequence[str]) -> DataError:
    """The refusal of labels for which a source that names its classes has no name."""
    shown = first_three(labels)
    return DataError(f"{root}: there are labels without a class's name: {shown}; give labelled images of one data set")


def split_name(root: Path, path: Path) -> str | None:
    """The last word of a path below `root` that names a split, in lower case.

    A word counts where it stands alone: `data/train-00000-of-00010.parquet`, `imagenet_val.tar`, `test/0.tar`.
    """
    return next((word for word in _WORD.findall(str(path.relative_to(root)).lower())[::-1] if word in SPLIT_WORDS), None)


def split_files(root: Path, files: Sequence[Path], what: str) -> dict[Split, list[Path]]:
    """Files by the split that their paths below `root` name (see `choose_splits`), sorted; those that name none are a notice.

    Raises DataError where a split has no files, or two names.
    """
    found: dict[str | None, list[Path]] = {}
    for path in sorted(files):
        found.setdefault(split_name(root, path), []).append(path)
    if unnamed := found.pop(None, []):
        shown = first_three([str(path.relative_to(root)) for path in unnamed])
        notice(f"{root}: {what} whose paths name no split are not used: {shown}")
    chosen = choose_splits({str(name): paths for name, paths in found.items()}, str(root))
    for split in ("train", "val"):
        if split not in chosen:
            raise DataError(
                f"{root}: no {what} for {PURPOSES[split]}; put one of these words into their paths: {known_split_names(split)}"
            )
    return chosen


def files_below(root: Path, pattern: str) -> list[Path]:
    """Files in `root`, not more than _MAX_DEPTH folders deep, whose names match the regular expression, sorted.

    Hidden files are left out, and whatever lies in hidden folders.
    """
    known = re.compile(pattern)
    found = []
    for folder, folders, files in os.walk(root, followlinks=True):
        depth = len(Path(folder).relative_to(root).parts)
        folders[:] = [name for name in folders if depth < _MAX_DEPTH and not is_hidden(name)]
        found += [Path(folder, name) for name in files if known.fullmatch(name) and not is_hidden(name)]
    return sorted(found)


def is_image_folder(root: Path) -> bool:
    """Whether `root` has class folders for both splits."""
    splits: dict[Split, list[Path]] = {split: [] for split in SPLIT_NAMES}
    for path in root.iterdir() if root.is_dir() else ():
        for split, groups in SPLIT_NAMES.items():
            if any(path.name.lower() in group for group in groups) and path.is_dir():
                splits[split].append(path)
    return all(any(has_folders(path) for path in paths) for paths in splits.values())


def has_folders(path: Path) -> bool:
    """Whether a folder is there and has folders that are not hidden."""
    return path.is_dir() and any(entry.is_dir() and not is_hidden(entry.name) for entry in os.scandir(path))
