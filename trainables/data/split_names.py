"""What data sets call their splits and classes, and which names in them are never data."""

import re
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
"""The names of each split, in order of preference; names in a group are synonyms. Case is ignored."""
SPLIT_OF: dict[str, Split] = {name: split for split, groups in SPLIT_NAMES.items() for group in groups for name in group}
PURPOSES: dict[Split, str] = {"train": "training", "val": "validation"}
_NOT_DATA = frozenset(
    ("__macosx", "@eadir", "lost+found", "thumbs.db", "desktop.ini", "$recycle.bin", "system volume information")
)


def is_hidden(name: str) -> bool:
    """Whether a name belongs to the system or an editor, such as .ipynb_checkpoints or ._x.jpg, and is never data."""
    return name.startswith(".") or name.lower() in _NOT_DATA


def choose_splits(found: Mapping[str, T], where: str) -> dict[Split, T]:
    """Choose the value of each split from `found`, which maps a source's names (in any case) to values; omit missing splits.

    A notice says when a test set is used for validation, and when it is not used. `where` names the source in messages.

    Raises DataError for two names of one group, which would be two validation sets.
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
    """List the names that a split may have, for messages."""
    return ", ".join(name for name, its_split in SPLIT_OF.items() if its_split == split)


def folded(name: str) -> str:
    """A class's name without what may differ by mistake: case, and blanks around it."""
    return name.strip().casefold()


def report_names(where: str, classes: Sequence[str]) -> None:
    """A notice of numbers that are sorted as text, of classes that may be one: they differ in case or blanks alone, and of
    classes that may be several: their words are other classes."""
    if all(name.isdecimal() for name in classes) and sorted(classes, key=int) != [*classes]:
        notice(f"{where}: classes in the order {', '.join(classes[:5])} … (sorted as text, as ImageFolder sorts its folders)")
    alike = Counter(map(folded, classes))
    if similar := [name for name in classes if alike[folded(name)] > 1]:
        notice(f"{where}: classes whose names differ in case or blanks alone: {first_three(similar)}")
    known = set(classes)
    if several := [name for name in classes if len(words := re.split(r"[\W_]+", name)) > 1 and known.issuperset(words)]:
        notice(f"{where}: classes that may be several others, while an image here has one: {first_three(several)}")
