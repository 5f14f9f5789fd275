"""Match a teacher's classes to the data's by WordNet id or name, to select the classifier's rows in label order.

Importing this module does not import torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from trainables.errors import AmbiguousClassesError, OtherClassesError
from trainables.models.libraries.interface import WORDNET_ID, TrainedInput, installed
from trainables.notices import notice

_NUMBERED = re.compile(r"\D*(\d+)")
_REMEDY = "choose weights trained on these classes, or leave weights out to train the teacher on them first"


def class_rows(record: TrainedInput, classes: Sequence[str], what: str, *, ours: bool) -> tuple[int, ...] | None:
    """Return each data class's label in the weights `what`; None if labels are equal or names are not comparable.

    Names in a checkpoint of `ours` must match exactly. Published names are compared ignoring case and underscores; if the number
    of classes is equal but most names differ, the classes are assumed to be the data's. A selection raises a notice.

    Raises:
        OtherClassesError: a class is missing, or the counts differ.
        AmbiguousClassesError: a class has several labels, two classes have one label, or numbers were sorted as text.
    """
    count, is_exact = record.num_classes, ours
    if ours:
        labels = _labels(classes, zip(record.categories))
    elif all(map(WORDNET_ID.fullmatch, classes)) and (record.wordnet_ids or not installed("timm")):
        if not record.wordnet_ids and count != len(classes):
            fact = f"{what} has {count} classes and the data {len(classes)} WordNet ids, which only timm can look up"
            raise AmbiguousClassesError.of(fact, "`pip install raydistill[timm]`", count)
        # ImageNet's labels are in the order of their ids.
        labels, is_exact = _labels(classes, zip(record.wordnet_ids or sorted(classes))), True
    else:
        published = [{_plain(name) for name in (names, *names.split(", "))} for names in record.categories]
        labels = _labels(map(_plain, classes), published)
        if count == len(classes) and not any(labels) and all(map(_NUMBERED.fullmatch, classes)):
            _check_numbers(classes, what)
    num_found = sum(map(bool, labels))
    if count == len(classes):
        in_place = all(label in found or not found for label, found in enumerate(labels))
        if not is_exact and num_found < count / 2:  # other names
            if record.categories:
                notice(f"weights {what}: its {count} classes have other names than the data's, and are matched by order")
            return None
        if in_place and (num_found == count or not is_exact):
            return None
    for name, found in zip(classes, labels, strict=True):
        if not found:
            fact = f"{what} has {count} classes, none of them {name!r}, and the data has {len(classes)}"
            raise OtherClassesError.of(fact, _REMEDY, count)
        if len(found) > 1:
            instead = "name the data's classes by WordNet ids (n01440764, …)"
            raise AmbiguousClassesError.of(f"{what} has several classes {name!r}", instead, count)
    rows = tuple(found[0] for found in labels)
    first = {row: name for name, row in zip(reversed(classes), reversed(rows), strict=True)}
    for name, row in zip(classes, rows, strict=True):
        if first[row] != name:
            fact = f"{what}: {first[row]!r} and {name!r} of the data are both its class {row}"
            raise AmbiguousClassesError.of(fact, "merge the two folders", count)
    by = "by WordNet id" if is_exact and not ours else "by name"
    notice(f"weights {what}: {len(rows)} of its {count} classes are used, {by}, in the order of the data's")
    return rows


def _labels(classes: Iterable[str], published: Iterable[Iterable[str]]) -> list[list[int]]:
    """Return for each class the labels that have its name, of the `published` names of each label."""
    found: dict[str, list[int]] = {}
    for label, names in enumerate(published):
        for name in names:
            found.setdefault(name, []).append(label)
    return [found.get(name, []) for name in classes]


def _plain(name: str) -> str:
    return name.lower().replace("_", " ")


def _check_numbers(classes: Sequence[str], what: str) -> None:
    """Raise AmbiguousClassesError if the class names are all numbers, sorted as text: 10 before 2."""
    numbers = [int(re.sub(r"\D", "", name)) for name in classes]
    expected = sorted(numbers)
    if expected == list(range(expected[0], expected[0] + len(numbers))) and numbers != expected:
        label = next(label for label, number in enumerate(numbers) if number != expected[label])
        number = expected[label]
        fact = f"{what} has its classes in another order: its class {label} is number {number}, the data's is {classes[label]!r}"
        instead = "name the data's classes by numbers of equal length (0002, …) or by WordNet ids (n01440764, …)"
        raise AmbiguousClassesError.of(fact, instead, len(classes))
