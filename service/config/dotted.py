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


def put(tree: dict[str, Any], values: Mapping[str, Any], where: str) -> None:
    """Set dotted keys in place. Under `sweep.space` the rest of a key is one key, dots and all.

    Raises ExperimentError: a part of a key is not a section.
    """
    for key, value in values.items():
        parts = ["sweep", "space", key.removeprefix("sweep.space.")] if key.startswith("sweep.space.") else key.split(".")
        section = tree
        for depth, part in enumerate(parts[:-1], start=1):
            if section.get(part) is None:
                section[part] = {}
            if not isinstance(section[part], dict):
                raise ExperimentError(f"{where}: {'.'.join(parts[:depth])} is a value, not a section")
            section = section[part]
        section[parts[-1]] = value


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted key → value; a sweep's space stays one value."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        flat |= flatten(value, f"{name}.") if isinstance(value, Mapping) and value and name != "sweep.space" else {name: value}
    return flat
