"""Nested mappings, as YAML has an experiment, and their dotted keys, such as `data.path`."""

from collections.abc import Mapping
from typing import Any

from trainables.errors import ExperimentError


def merge(below: dict[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """`above` over `below`, mappings merged key by key; a sweep's space is replaced as a whole."""
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        merged[key] = merge(old, value) if isinstance(old, dict) and isinstance(value, dict) and key != "space" else value
    return merged


def put(tree: dict[str, Any], key: str, value: Any, where: str) -> None:
    """Set a dotted key in place. Under `sweep.space` the rest of the key is one key, dots and all.

    Raises ExperimentError: a part of the key is not a section.
    """
    parts = ["sweep", "space", key.removeprefix("sweep.space.")] if key.startswith("sweep.space.") else key.split(".")
    for depth, part in enumerate(parts[:-1], start=1):
        if tree.get(part) is None:
            tree[part] = {}
        if not isinstance(tree[part], dict):
            raise ExperimentError(f"{where}: {'.'.join(parts[:depth])} is a value, not a section")
        tree = tree[part]
    tree[parts[-1]] = value


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted key → value; a sweep's space stays one value."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        flat |= flatten(value, f"{name}.") if isinstance(value, Mapping) and value and name != "sweep.space" else {name: value}
    return flat
