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
from trainables.rundir import expand_home
from trainables.user_code import file_of, option_key

WORDS = (*SOURCES, "none", "ram")
"""Values of `data.path` and `data.stage` that are no paths."""


def absolute(path: str) -> str:
    """The absolute path of a file or folder that exists; a word, or a name that does not exist here, as it is."""
    if path.startswith(FOLDER_SCHEME):
        return with_absolute_file(path)
    expanded = _with_variables(path)
    full = expand_home(expanded).absolute()
    return str(full) if path not in WORDS and (full.exists() or path.startswith("~")) else expanded


def absolute_or_new(path: str) -> str:
    """The absolute path of a file or folder, existing or not."""
    return os.path.abspath(expand_home(_with_variables(path)))


def with_absolute_file(name: str) -> str:
    """The name of a method or model; `FILE.py:CLASS` and `local-dir:FOLDER` with the absolute path."""
    if (file := file_of(name)) is not None:
        return f"{file.absolute()}:{option_key(name)}"
    folder = name.removeprefix(FOLDER_SCHEME)
    return name if folder == name else FOLDER_SCHEME + absolute_or_new(folder)


def _with_variables(path: str) -> str:
    """The path with the values of its `$NAME`s, as a shell has them. Raises ExperimentError: one is not set."""
    expanded = os.path.expandvars(path)
    if (unset := re.search(r"\$(\w+|\{[^}]*\})", expanded)) and not os.path.exists(expanded):
        raise ExperimentError(f"{path}: there is no environment variable {unset[0]}: set it, or write the whole path")
    return expanded


PATHS: dict[str, Callable[[str], str]] = {
    "data.path": absolute,
    "data.more.path": absolute,
    "data.stage": absolute,
    "eval.path": absolute,
    "model": with_absolute_file,
    **{f"{model}.model": with_absolute_file for model in ("student", "teacher", "teachers", "assistants")},
    **{f"{model}.weights": absolute for model in ("student", "teacher", "teachers")},
    **{f"{model}.classes": absolute for model in ("teacher", "teachers")},
    **{f"{model}.cache": absolute_or_new for model in ("teacher", "teachers")},
    "distill.method": with_absolute_file,
    "tracking.uri": checked_uri,
}
"""The keys whose values are paths or have some, those in lists without an index."""


def absolute_paths(tree: Mapping[str, Any], method: Callable[[str], str] = with_absolute_file) -> dict[str, Any]:
    """The values of an experiment, whole or in part, that have relative paths, with absolute ones: dotted key → value.

    `method`: what becomes of the name of a method or model that is in a file. Raises ExperimentError: a path that cannot be.
    """

    def changed(key: str, value: Any) -> Any:
        inside = "" if key == "sweep.points" else f"{key}."  # a point has dotted keys of its own
        match value:
            case str() if key in PATHS:
                return method(value) if file_of(value) and PATHS[key] is with_absolute_file else PATHS[key](value)
            case list() | tuple():
                return [changed(key, each) for each in value]
            case {**parts}:
                return {name: changed(f"{inside}{name}", part) for name, part in parts.items()}
        return value

    flat = flatten(tree)
    space = flat.pop("sweep.space", {})
    flat |= {f"sweep.space.{key}": values for key, values in space.items()} if isinstance(space, Mapping) else {}
    found = {key: changed(key.removeprefix("sweep.space."), value) for key, value in flat.items()}
    return {key: value for key, value in found.items() if value != flat[key]}
