"""What data sets call their splits, and which names in them are never data."""

from collections.abc import Iterable, Mapping
from typing import TypeVar

from trainables.data.order import Split
from trainables.errors import DataError
from trainables.notices import notice

T = TypeVar("T")

SPLIT_NAMES: dict[Split, tuple[tuple[str, ...], ...]] = {
    "train": (("train", "training"),),
    "val": (("val", "valid", "validation", "dev"), ("test", "testing", "eval")),
}
"""The names of each split in the order of their preference; those of one group mean the same. Compared without case."""
PURPOSES: dict[Split, str] = {"train": "training", "val": "validation"}
SPLIT_WORDS = frozenset(name for groups in SPLIT_NAMES.values() for group in groups for name in group)
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
        for number, group in enumerate(groups):
            names = _named(found, group)
            if len(names) > 1:
                raise DataError(
                    f"{where} has {' and '.join(names)}, which both mean the {PURPOSES[split]} set: rename or remove one of them"
                )
            if not names:
                continue
            chosen[split] = found[names[0]]
            others = [name for later in groups[number + 1 :] for name in _named(found, later)]
            if others:
                notice(f"{where}: {names[0]} is the {PURPOSES[split]} set; {' and '.join(others)} is not used")
            elif number:
                notice(f"{where}: {names[0]} is the {PURPOSES[split]} set, since there is no {' or '.join(groups[0])}")
            break
    return chosen


def _named(found: Iterable[str], group: tuple[str, ...]) -> list[str]:
    """The names in `found` that are those of a group but for their case, in the group's order."""
    return [name for word in group for name in found if name.lower() == word]


def known_split_names(split: Split) -> str:
    """The names that a split may have, for a message."""
    return ", ".join(name for group in SPLIT_NAMES[split] for name in group)
