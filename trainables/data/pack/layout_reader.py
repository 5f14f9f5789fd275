"""What a reader of some layout of images gives to the packing.

Shapes: N samples of a split.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainables.data.decode import Sample, UnreadableImageError
from trainables.data.order import Split
from trainables.data.sources.folder import first_three
from trainables.errors import DataError

_WORD = re.compile(r"[a-z]+")

Location = Any
"""Where a reader finds a sample: a path, or a file and a position in it. JSON-like, since it travels and is compared."""
Label = int | str


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


class Located(NamedTuple):
    """Where the samples of each split lie, and their labels as the source has them."""

    locations: dict[Split, list[Location]]
    labels: dict[Split, list[Label]]


def locate(files: Mapping[Split, Sequence[Path]], samples: Callable[[Path], Iterable[tuple[Location, Label]]]) -> Located:
    """The samples of all files in their order; `samples` gives those of one."""
    found = Located({"train": [], "val": []}, {"train": [], "val": []})
    for split, paths in files.items():
        for path in paths:
            for location, label in samples(path):
                found.locations[split].append(location)
                found.labels[split].append(label)
    return found


def numbered(root: Path, located: Located, names: Mapping[Label, str] | None = None, *, pixels: bool = False) -> Listing:
    """The listing with labels 0 … K−1, from whatever a source calls its labels: the sorted values that train has.

    A class's name is what `names` calls it, or else the value itself. Raises DataError for a value that only validation has.
    """
    train, val = located.labels["train"], located.labels["val"]
    values = sorted(set(train), key=lambda value: (isinstance(value, str), value))
    if unknown := sorted(map(str, set(val) - set(values))):
        raise DataError(
            f"{root}: validation has labels that train has not: {first_three(unknown)}; give the two splits of one data set"
        )
    classes = tuple((names or {}).get(value, str(value)) for value in values)
    if len(set(classes)) < len(classes):  # two numbers under one name
        classes = tuple(str(value) for value in values)
    index_of = {value: index for index, value in enumerate(values)}
    labels = {
        split: np.array([index_of[value] for value in of_split], dtype=np.int64) for split, of_split in located.labels.items()
    }
    return Listing(classes, splits_of(located, labels), pixels)


def splits_of(located: Located, labels: Mapping[Split, NDArray[np.int64]]) -> dict[Split, SplitListing]:
    """Each split's samples with these labels."""
    return {split: SplitListing(located.locations[split], labels[split]) for split in labels}


def unnamed_labels(root: Path, labels: Sequence[str]) -> DataError:
    """The refusal of labels for which a source that names its classes has no name."""
    shown = first_three(labels)
    return DataError(f"{root}: there are labels without a class's name: {shown}; give labelled images of one data set")


def split_files(root: Path, files: Sequence[Path], what: str) -> dict[Split, list[Path]]:
    """Files by the split that their path below `root` names, sorted: train; and val, or else validation, or else test.

    A word counts where it stands alone: `data/train-00000-of-00010.parquet`, `imagenet_val.tar`, `test/0.tar`.
    Raises DataError where a split has no files.
    """
    words = {path: set(_WORD.findall(str(path.relative_to(root)).lower())) for path in sorted(files)}
    train = [path for path in words if "train" in words[path] or "training" in words[path]]
    for name in ("val", "validation", "test"):
        if val := [path for path in words if name in words[path] and path not in train]:
            break
    if not train or not val:
        raise DataError(
            f"{root}: no {what} of {'validation' if train else 'training'}; its files' names hold the word "
            f"{'val, validation or test' if train else 'train'}"
        )
    return {"train": train, "val": val}


def files_below(root: Path, pattern: str) -> list[Path]:
    """Files in `root` and in its folders, not deeper, whose names match the regular expression, sorted."""
    known = re.compile(pattern)
    return sorted(path for level in ("*", "*/*") for path in root.glob(level) if known.fullmatch(path.name) and path.is_file())
