"""What data sets call their splits and classes, and which names in them are never data."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TypeVar

from trainables.data.order import Split
from trainables.errors import DataError, first_three
from trainables.notices import notice

T = TypeVar("T")

SPLIT_NAMES: dict[Split, tuple[tuple[str, ...], ...]] = {
    "train": (("train", "training"),),
    "val": (("val", "valid", "validation", "dev"), ("test", "testing", "eval")),
}
"""The names of each split in the order of their preference; those of one group mean the same. Compared without case."""
SPLIT_OF: dict[str, Split] = {name: split for split, groups in SPLIT_NAMES.items() for group in groups for name in group}
PURPOSES: dict[Split, str] = {"train": "training", "val": "validation"}
_NOT_DATA = frozenset(
    ("__macosx", "@eadir", "lost+found", "thumbs.db", "desktop.ini", "$recycle.bin", "system volume information")
)


def is_hidden(name: str) -> bool:
    """Whether a file or folder of this name is the system's or an editor's, as .ipynb_checkpoints and ._x.jpg, and never data."""
    return name.startswith(".") or name.lower() in _NOT_DATA


def choose_splits(found: Mapping[str, T], where: str) -> dict[Split, T]:
    """The value that each split has in `found`, by the names that a source has, in any case; a split without one is left out.

    A notice says where a set that is called test is the validation set, and where a test set is not used.

    Raises DataError: two names of a group, which would be two validation sets. `where` names the source.
    """
    chosen: dict[Split, T] = {}
    for split, groups in SPLIT_NAMES.items():
        named = [[name for word in group for name in found if name.lower() == word] for group in groups]
        number = next((number for number, names in enumerate(named) if names), None)
        if number is None:
            continue
        (first, *more), purpose = named[number], PURPOSES[split]
        if more:
            raise DataError(
                f"{where} has {' and '.join(named[number])}, which both mean the {purpose} set: rename or remove one of them"
            )
        chosen[split] = found[first]
        if unused := [name for names in named[number + 1 :] for name in names]:
            notice(f"{where}: {first} is the {purpose} set; {' and '.join(unused)} is not used")
        elif number:
            notice(f"{where}: {first} is the {purpose} set, since there is no {' or '.join(groups[0])}")
    return chosen


def known_split_names(split: Split) -> str:
    """The names that a split may have, for a message."""
    return ", ".join(name for name, its_split in SPLIT_OF.items() if its_split == split)


def folded(name: str) -> str:
    """A class's name without what may differ by mistake: case, and blanks around it."""
    return name.strip().casefold()


def report_names(where: str, classes: Sequence[str]) -> None:
    """A notice of numbers that are sorted as text, and of classes that may be one: they differ in case or blanks alone."""
    if all(name.isdecimal() for name in classes) and sorted(classes, key=int) != [*classes]:
        notice(f"{where}: classes in the order {', '.join(classes[:5])} … (sorted as text, as ImageFolder sorts its folders)")
    alike = Counter(map(folded, classes))
    if similar := [name for name in classes if alike[folded(name)] > 1]:
        notice(f"{where}: classes whose names differ in case or blanks alone: {first_three(similar)}")
