"""The interface of readers of image layouts, used for packing and, if samples can be read individually, for training.

Shapes: N samples of a split.
"""

import hashlib
import itertools
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainables.data.decode import Sample, UnreadableImageError, read_file
from trainables.data.interface import HOLD_OUT, NO_LABELS
from trainables.data.order import Split
from trainables.data.split_names import PURPOSES, SPLIT_NAMES, SPLIT_OF, choose_splits, is_hidden, known_split_names, report_names
from trainables.errors import DataError, first_three, printable
from trainables.notices import notice

_WORD = re.compile(r"[a-z]+")
_DECIMAL = re.compile(r"(?i)nan|[-+]?(\d+\.\d*|\.\d+)(e[-+]?\d+)?")
_NUMBER = r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?"
_SEVERAL_NUMBERS = re.compile(rf"(?i)[\[(]?\s*{_NUMBER}(\s*[|;,\s]\s*{_NUMBER})+\s*,?\s*[\])]?")
_LIST = " []()'\""
"""Signs around the elements of a Python or JSON list."""
_VAL_SHARE = 0.1
_MAX_DEPTH = 2
"""The number of folders between a source and its files, as in Hugging Face's CONFIG/SPLIT/0000.parquet."""
LABEL_FIELDS = (
    *("label", "labels", "fine_label", "class", "cls", "target", "category", "class_name", "coarse_label"),
    *("class_id", "classid", "label_id", "category_id"),
)
"""Names of a column or field with the class, in order of preference."""

Location = Any
"""Where a reader finds a sample: a path, or a file and a position in it. JSON-like, to be sent and compared."""
Label = int | str


@dataclass(frozen=True)
class SplitListing:
    """One split of a source, in order: the location and the label of each sample."""

    locations: Sequence[Location]
    labels_N: NDArray[np.int64]


@dataclass(frozen=True)
class Listing:
    """A whole source. Labels are indices into `classes`, or -1 without labels; with `pixels`, samples are pixels, not image
    files."""

    classes: tuple[str, ...]
    splits: Mapping[Split, SplitListing]
    pixels: bool = False


class Piece(NamedTuple):
    """The location of a sample in a file of many: the file's path below the root, and the sample's name in the file."""

    file: str
    offset: int
    size: int
    name: str


class LayoutReader(ABC):
    """Reads one layout of images in the folder `root`: its files, and the samples of each. The constructor reads nothing.

    labels: False ignores labels and does not require them. val_share: the share to hold out (see `is_held_out`) if the source has
    no validation split; None is 0.1 without labels, and an error with labels; 0 skips the validation images, if any.

    A location is a file's path below the root, or a Piece; training reads these with `read_one`, from several threads at once. A
    layout with other locations is not `random_access`, and overrides `read`.
    """

    what = ""
    """The name of its files in messages."""
    random_access = True
    text_is_index = False
    """Whether the layout writes indices as text, so that the labels "0" … "K−1" are the indices."""
    pixels = False
    classes: Sequence[str] | None = None
    """The names of the labels 0 … K−1, if the source declares them."""

    def __init__(self, root: Path, labels: bool = True, val_share: float | None = None) -> None:
        self.root = self.given = root
        self.labels, self.val_share = labels, val_share
        self.holds_out = not labels or val_share is not None
        self.names: dict[Label, str] = {}
        """Names of some labels, for a source without `classes`."""

    @classmethod
    @abstractmethod
    def files(cls, root: Path) -> list[Path]:
        """Find the layout's files in `root` by their names or a few bytes; [] if `root` has another layout."""

    def splits(self) -> Mapping[Split, Sequence[Any]]:
        """Return the files of each split, or other parts of a source.

        Raises DataError if a split has none, except the validation split if `holds_out`.
        """
        return split_files(self.root, self.files(self.root), self.what, self.holds_out)

    @abstractmethod
    def samples(self, part: Any) -> Iterable[tuple[Location, Label | None]]:
        """Yield each sample in one of the parts from `splits`, with its label as stored. Raises DataError.

        Without `labels`, None means that the sample has no label, and anything else that it has one.
        """

    def listing(self) -> Listing:
        """List all samples of both splits; with labels, samples with the label -1 are skipped with a notice.

        Raises DataError if there are none, labels are inconsistent, or `val_share` does not fit.
        """
        locations: dict[Split, list[Location]] = {"train": [], "val": []}
        labels: dict[Split, list[Any]] = {"train": [], "val": []}
        parts_of = {split: parts for split, parts in self.splits().items() if split == "train" or self.val_share != 0}
        if self.val_share and "val" in parts_of:
            raise DataError(f"{self.given} has a validation split of its own: leave out val_share, or move the split elsewhere")
        rewritten: tuple[Label | None, Label | None] | None = None
        for split, parts in parts_of.items():
            num_unlabeled = 0
            for part in parts:
                first = len(labels[split])
                for location, written in self.samples(part):
                    label = self._whole(written, location) if self.labels and isinstance(written, str) else written
                    rewritten = rewritten or (written, label) if label != written else rewritten
                    if self.labels and label in (-1, "-1"):
                        num_unlabeled += 1
                        continue
                    locations[split].append(location)
                    labels[split].append(label)
                if not self.labels or self.classes is None:
                    continue
                if unnamed := {*labels[split][first:]} - {*range(len(self.classes))}:
                    shown = first_three(sorted(map(str, unnamed)))
                    raise DataError(
                        f"{part}: there are labels without a class name: {shown}; give labeled images of one data set"
                    )
            if num_unlabeled:
                lines = f"{num_unlabeled} {split} samples have the label -1 (unlabeled)"
                if not labels[split]:
                    raise DataError(f"{self.root}: all {lines}; give a labeled split")
                notice(f"{self.root}: {lines} and are skipped")
        both = {location for location in locations["train"] if isinstance(location, str)}.intersection(locations["val"])
        if both:
            notice(f"{self.root}: {len(both)} of the validation images are training images too: {first_three(sorted(both))}")
        if rewritten:
            notice(f"{self.given}: the class {rewritten[0]} is read as {rewritten[1]}, and so on")
        if self.labels:
            self._refuse_several(locations, labels)
        classes, labels_N = self._numbered(labels)
        splits = {split: SplitListing(locations[split], labels_N[split]) for split in labels}
        return Listing(classes, splits if "val" in parts_of else self._held_out(splits["train"], classes), self.pixels)

    def _whole(self, label: str, location: Location) -> str:
        """Return 3 for 3.0 and 3.000e+00, as pandas and numpy write whole numbers. Raises DataError for other fractions."""
        if not _DECIMAL.fullmatch(label):
            return label
        number = Decimal(label)
        if number.is_nan() or number != number.to_integral_value():
            raise DataError(f"{self.given}: {self.name(location)} has the class {label}: write whole numbers or names")
        return str(int(number))

    def _refuse_several(self, locations: Mapping[Split, list[Location]], labels: Mapping[Split, list[Any]]) -> None:
        """Raise DataError if a label in text is several: numbers, or other samples' labels, with separators between them."""
        every = {label for of_split in labels.values() for label in of_split if isinstance(label, str)}
        single = {label.strip(_LIST) for label in every}
        for label in sorted(every):
            parts = [part.strip(_LIST) for part in re.split(r"[|;,]", label)]
            if (len(parts) > 1 and single.issuperset(parts)) or _SEVERAL_NUMBERS.fullmatch(label):
                split: Split = "train" if label in labels["train"] else "val"
                name = self.name(locations[split][labels[split].index(label)])
                raise DataError(
                    f"{self.given}: {name} has several classes ({label}), and an image here has one: write one; {NO_LABELS}"
                )

    def _held_out(self, every: SplitListing, classes: Sequence[str]) -> dict[Split, SplitListing]:
        """Split a source without a validation split. Raises DataError if a split, or a class in training, would be empty."""
        if self.val_share in (0, 1):
            none = SplitListing([], every.labels_N[:0])
            return {"train": every, "val": none} if self.val_share == 0 else {"train": none, "val": every}
        share = self.val_share or _VAL_SHARE
        held_out_N = np.array([is_held_out(self.name(location), share) for location in every.locations], dtype=bool)
        num_val, total = int(held_out_N.sum()), len(held_out_N)
        whole = f"{self.given}: at a val_share of {share}, {num_val:,} of its {total:,} images are held out for validation"
        if total and num_val in (0, total):
            raise DataError(f"{whole}; write another val_share, or put images into train/ and val/")
        if gone := sorted({*range(len(classes))} - {*every.labels_N[~held_out_N].tolist()}):
            raise DataError(f"{whole}, including all of {first_three([classes[label] for label in gone])}; write a smaller one")
        notice(f"data.val_share: {num_val:,} of {total:,} images are held out for validation, by a hash of their paths")
        chosen: dict[Split, NDArray[np.bool_]] = {"train": ~held_out_N, "val": held_out_N}
        return {
            split: SplitListing(list(itertools.compress(every.locations, of_split_N)), every.labels_N[of_split_N])
            for split, of_split_N in chosen.items()
        }

    def _numbered(self, labels: Mapping[Split, list[Any]]) -> tuple[tuple[str, ...], dict[Split, NDArray[np.int64]]]:
        """Return the classes, the sorted label values of the training split, and each split's labels as indices 0 … K−1.

        Without `labels`, there are no classes, and all labels are -1. Numbers are sorted as numbers, text as text, as ImageFolder
        sorts its folders.

        Raises DataError for a value that only validation has.
        """
        if not self.labels:
            if any(label is not None for of_split in labels.values() for label in of_split):
                notice(f"{self.given}: its labels are not used")
            return (), {split: np.full(len(of_split), -1, dtype=np.int64) for split, of_split in labels.items()}
        if self.classes is not None:
            return tuple(self.classes), {split: np.array(of_split, dtype=np.int64) for split, of_split in labels.items()}
        every = {*labels["train"], *labels["val"]}
        is_index = self.text_is_index and {str(value) for value in every} == {str(index) for index in range(len(every))}
        kind: type[Any] = str if not is_index and any(isinstance(value, str) for value in every) else int
        values: list[Any] = sorted(set(map(kind, set(labels["train"]))))
        if unknown := sorted(map(str, set(map(kind, every)) - set(values))):
            shown = first_three(unknown)
            raise DataError(
                f"{self.root}: validation has labels that train does not have: {shown}; give two splits of the same data set"
            )
        classes = tuple(printable(self.names.get(value, str(value))) for value in values)
        report_names(str(self.root), classes)
        if len(set(classes)) < len(classes):  # two numbers under one name
            classes = tuple(map(str, values))
        index_of = {value: index for index, value in enumerate(values)}
        return classes, {
            split: np.array([index_of[kind(value)] for value in of_split], dtype=np.int64) for split, of_split in labels.items()
        }

    def name(self, location: Location) -> str:
        """Return the sample's printable name for messages."""
        return printable(location if isinstance(location, str) else f"{location[0]}/{location[3]}")

    def read_one(self, location: Location) -> Sample:
        """Read a sample. Raises UnreadableImageError if it is unreadable, OSError if the disk or network fails."""
        if isinstance(location, str):
            return read_file(os.path.join(self.root, location))
        file, offset, size, _ = location
        with open(self.root / file, "rb") as opened:
            opened.seek(offset)
            content = opened.read(size)
        if len(content) < size:
            raise UnreadableImageError("truncated")
        return self.decode(content)

    def decode(self, content: bytes) -> Sample:
        """Return the sample in the bytes of a Piece. Raises UnreadableImageError."""
        return content

    def read(self, locations: Sequence[Location]) -> Iterator[tuple[str, Sample | UnreadableImageError]]:
        """Yield, for each location, the sample's name, and its content or the error that makes it unreadable.

        Raises OSError if the disk or network fails, or a file of many samples is gone, since the samples may be intact.
        """
        for location in locations:
            try:
                yield self.name(location), self.read_one(location)
            except UnreadableImageError as error:
                yield self.name(location), error


def is_held_out(name: str, share: float) -> bool:
    """Whether the sample of this name is in the validation `share`; this does not depend on the other samples."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8]) < share * 2**64


def split_name(root: Path, path: Path) -> str | None:
    """Return the last word of a path below `root` that names a split, in lower case; None if there is none.

    Only whole words count: `data/train-00000-of-00010.parquet`, `imagenet_val.tar`, `test/0.tar`.
    """
    return next((word for word in _WORD.findall(str(path.relative_to(root)).lower())[::-1] if word in SPLIT_OF), None)


def split_files(root: Path, files: Sequence[Path], what: str, holds_out: bool = False) -> dict[Split, list[Path]]:
    """Sort files into the splits that their paths below `root` name (see `choose_splits`); a notice lists the others.

    With `holds_out`, validation files may be missing, and if no file names a split, all are for training.

    Raises DataError if a split has no files, or two names.
    """
    found: dict[str, list[Path]] = {}
    for path in sorted(files):
        found.setdefault(split_name(root, path) or "", []).append(path)
    unnamed = found.pop("", [])
    if holds_out and not found:
        return {"train": unnamed}
    if unnamed:
        shown = first_three([str(path.relative_to(root)) for path in unnamed])
        notice(f"{root}: {what} whose paths name no split are not used: {shown}")
    chosen = choose_splits(found, str(root))
    for split in SPLIT_NAMES:
        if split not in chosen and not (holds_out and split == "val"):
            advice = f"; {HOLD_OUT}" if split == "val" or not found else ""
            raise DataError(
                f"{root}: no {what} for {PURPOSES[split]}; put one of these words into their paths: "
                f"{known_split_names(split)}{advice}"
            )
    return chosen


def files_below(root: Path, pattern: str) -> list[Path]:
    """List the files at most _MAX_DEPTH folders below `root` whose names match the regular expression, sorted.

    Hidden files and folders are skipped.
    """
    known = re.compile(pattern)
    found = []
    for folder, folders, files in os.walk(root, followlinks=True):
        depth = len(Path(folder).relative_to(root).parts)
        folders[:] = [name for name in folders if depth < _MAX_DEPTH and not is_hidden(name)]
        found += [Path(folder, name) for name in files if known.fullmatch(name) and not is_hidden(name)]
    return sorted(found)
