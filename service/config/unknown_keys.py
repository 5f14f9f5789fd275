"""Experiments that another version wrote: what this version knows of them can be read."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

Model = TypeVar("Model", bound=BaseModel)


def validate_known_keys(section: type[Model], tree: Mapping[str, Any]) -> tuple[Model, tuple[str, ...]]:
    """The section without the keys that it does not have, and the dotted names of these.

    Raises pydantic.ValidationError: a value of a known key is wrong.
    """
    tree = copy.deepcopy(dict(tree))
    unknown: list[str] = []
    while True:
        try:
            return section.model_validate(tree), tuple(unknown)
        except ValidationError as error:
            extra = [detail["loc"] for detail in error.errors() if detail["type"] == "extra_forbidden"]
            removed = [key for loc in extra if (key := _remove(tree, loc))]
            if not removed:
                raise
            unknown += removed


def _remove(tree: Any, loc: Sequence[str | int]) -> str:
    """Take the key at `loc` out of `tree`. Returns its dotted name, or "" where there is no such key."""
    names = []
    for part in loc[:-1]:
        if part in (tree if isinstance(tree, dict) else range(len(tree))):  # otherwise it is the name of a union's branch
            names.append(str(part))
            tree = tree[part]
    if not isinstance(tree, dict) or loc[-1] not in tree:
        return ""
    del tree[loc[-1]]
    return ".".join([*names, str(loc[-1])])
