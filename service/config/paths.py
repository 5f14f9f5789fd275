"""Paths of an experiment as processes that run elsewhere understand them: relative ones begin in the user's directory."""

import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from service.config.dotted import flatten
from service.config.uris import checked_uri
from trainables.config.models import FOLDER_SCHEME
from trainables.data.source import SOURCES
from trainables.errors import ExperimentError
from trainables.methods.method_file import file_of, option_key
from trainables.rundir import expand_home


def absolute(path: str) -> str:
    """The absolute path of a file or folder that exists; a built-in source, or what does not exist here, as it is."""
    if path.startswith(FOLDER_SCHEME):
        return absolute_model(path)
    expanded = _with_variables(path)
    full = expand_home(expanded).absolute()
    return str(full) if path not in SOURCES and full.exists() else expanded


def absolute_or_new(path: str) -> str:
    """The absolute path of a file or folder, existing or not."""
    return os.path.abspath(expand_home(_with_variables(path)))


def absolute_model(name: str) -> str:
    """A model's name; that of a folder, `local-dir:FOLDER`, with its absolute path."""
    folder = name.removeprefix(FOLDER_SCHEME)
    return name if folder == name else FOLDER_SCHEME + absolute_or_new(folder)


def _with_variables(path: str) -> str:
    """The path with the values of its `$NAME`s, as a shell has them. Raises ExperimentError: one is not set."""
    expanded = os.path.expandvars(path)
    if (unset := re.search(r"\$(\w+|\{[^}]*\})", expanded)) and not os.path.exists(expanded):
        raise ExperimentError(f"{path}: there is no environment variable {unset[0]}: set it, or write the whole path")
    return expanded


def with_absolute_file(method: str) -> str:
    """A method's name; that of a method in a file, `FILE.py:CLASS`, with the file's absolute path."""
    file = file_of(method)
    return method if file is None else f"{file.absolute()}:{option_key(method)}"


def absolute_stage(stage: str) -> str:
    """`data.stage`: a folder of each node, or a word."""
    return stage if stage in ("none", "ram") else absolute_or_new(stage)


def absolute_store(uri: str) -> str:
    """`tracking.uri`, a relative SQLite path made absolute."""
    return checked_uri(uri) if uri.startswith("sqlite") else uri


PATHS: dict[str, Callable[[str], str]] = {
    "data.path": absolute,
    "data.more": absolute,
    "data.stage": absolute_stage,
    "eval.path": absolute,
    "teacher.weights": absolute,
    "teacher.classes": absolute,
    "student.model": absolute_model,
    "student.weights": absolute,
    "teacher.cache": absolute_or_new,
    "teachers": absolute,
    "distill.method": with_absolute_file,
    "tracking.uri": absolute_store,
}
"""The keys whose values are paths or have some."""


def absolute_paths(tree: Mapping[str, Any], method: Callable[[str], str] = with_absolute_file) -> dict[str, Any]:
    """The values of an experiment, whole or in part, that have relative paths, with absolute ones: dotted key → value.

    `method`: what becomes of the name of a method.
    """
    changes = {**PATHS, "distill.method": method}
    flat = flatten(tree)
    space = flat.pop("sweep.space", {})
    flat |= {f"sweep.space.{key}": values for key, values in space.items()} if isinstance(space, Mapping) else {}
    found = {key: _with_absolute(changes, key.removeprefix("sweep.space."), value) for key, value in flat.items()}
    return {key: value for key, value in found.items() if value != flat[key]}


def _with_absolute(changes: Mapping[str, Callable[[str], str]], key: str, value: Any) -> Any:
    """The value or values of a key."""
    if key == "sweep.points" and isinstance(value, list):
        return [_point(changes, point) if isinstance(point, Mapping) else point for point in value]
    return _mapped(changes[key], value) if key in changes else value


def _point(changes: Mapping[str, Callable[[str], str]], point: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _with_absolute(changes, key, value) for key, value in point.items()}


def _mapped(change: Callable[[str], str], value: Any) -> Any:
    match value:
        case str():
            return change(value)
        case list() | tuple():
            return [_mapped(change, each) for each in value]
        case {"weights": str(weights)}:  # a teacher of several
            own = {"classes": change(value["classes"])} if isinstance(value.get("classes"), str) else {}
            return {**value, "weights": change(weights), **own}
        case {"path": str(path)}:  # a set of data.more
            return {**value, "path": change(path)}
    return value
