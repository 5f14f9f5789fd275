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
    """A model's name; that of a folder, `local-dir:FOLDER`, or of a file, `FILE.py:CLASS`, with its absolute path."""
    if file_of(name):
        return with_absolute_file(name)
    folder = name.removeprefix(FOLDER_SCHEME)
    return name if folder == name else FOLDER_SCHEME + absolute_or_new(folder)


def _with_variables(path: str) -> str:
    """The path with the values of its `$NAME`s, as a shell has them. Raises ExperimentError: one is not set."""
    expanded = os.path.expandvars(path)
    if (unset := re.search(r"\$(\w+|\{[^}]*\})", expanded)) and not os.path.exists(expanded):
        raise ExperimentError(f"{path}: there is no environment variable {unset[0]}: set it, or write the whole path")
    return expanded


def with_absolute_file(method: str) -> str:
    """The name of a method or a model; of one in a file, `FILE.py:CLASS`, with the file's absolute path."""
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
    "data.more.path": absolute,
    "data.stage": absolute_stage,
    "eval.path": absolute,
    "model": absolute_model,
    **{f"{model}.model": absolute_model for model in ("student", "teacher", "teachers", "assistants")},
    **{f"{model}.weights": absolute for model in ("student", "teacher", "teachers")},
    **{f"{model}.classes": absolute for model in ("teacher", "teachers")},
    **{f"{model}.cache": absolute_or_new for model in ("teacher", "teachers")},
    "distill.method": with_absolute_file,
    "tracking.uri": absolute_store,
}
"""The keys whose values are paths or have some, those in lists without an index."""


def absolute_paths(tree: Mapping[str, Any], method: Callable[[str], str] = with_absolute_file) -> dict[str, Any]:
    """The values of an experiment, whole or in part, that have relative paths, with absolute ones: dotted key → value.

    `method`: what becomes of the name of a method, and of a model that is in a file.
    """

    def change(key: str, text: str) -> str:
        if key == "distill.method" or (file_of(text) and PATHS[key] is absolute_model):
            return method(text)
        return PATHS[key](text)

    def changed(key: str, value: Any) -> Any:
        inside = "" if key == "sweep.points" else f"{key}."  # a point has dotted keys of its own
        match value:
            case str() if key in PATHS:
                return change(key, value)
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
