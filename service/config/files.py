"""Experiments as files: the shipped recipes, YAML files, and the `base` that one may build on."""

import codecs
import os
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from service.config import strict_yaml
from service.config.dotted import merge
from trainables.errors import ExperimentError, did_you_mean

MAX_FILE_BYTES = 16 << 20


@dataclass(frozen=True)
class WrittenExperiment:
    """What a file and its bases say, before it is checked."""

    tree: dict[str, Any]
    marks: dict[str, str]
    """Dotted key → where it is written: FILE:LINE:COLUMN, or the recipe."""
    where: str
    """The file or recipe itself, for messages."""


def recipes() -> dict[str, str]:
    """Shipped recipes: name → the comment in their first line."""
    return shipped("service.recipes")


def shipped(package: str) -> dict[str, str]:
    """The YAML files of a package: name → the comment in their first line."""
    files = sorted(resources.files(package).iterdir(), key=lambda entry: entry.name)
    found = {file.name: file.read_text(encoding="utf-8") for file in files if file.name.endswith(".yaml")}
    return {name.removesuffix(".yaml"): text.splitlines()[0].lstrip("# ") for name, text in found.items()}


def read_experiment_file(name: str, named_by: tuple[str, ...] = ()) -> WrittenExperiment:
    """A recipe or file merged over its bases. `named_by`: the files whose `base` led here, the first one first.

    Raises ExperimentError: there is no such recipe or file, it is no experiment, or its bases lead back to it.
    """
    is_recipe = name in recipes()
    path = name if is_recipe else os.path.realpath(name)
    if path in [os.path.realpath(file) for file in named_by]:
        cycle = " → ".join(Path(file).name for file in (*named_by, name))
        raise ExperimentError(f"{name}: `base` leads back to itself ({cycle})")
    if is_recipe:
        text, where = (resources.files("service.recipes") / f"{name}.yaml").read_text(encoding="utf-8"), f"recipe {name}"
    else:
        text, where = _text_of(name, f"{named_by[-1]}: base: {name}" if named_by else name), name
    tree, marks = strict_yaml.parse_marked(text, where)
    if not isinstance(tree, dict):
        raise ExperimentError(f"{where}: an experiment is a mapping, such as `data: {{path: digits}}`")
    if is_recipe:
        marks = dict.fromkeys(marks, where)
    base = tree.pop("base", None)
    if base is None:
        return WrittenExperiment(tree, marks, where)
    if not isinstance(base, str):
        raise ExperimentError(f"{where}: base: give one recipe or file")
    relative = base if is_recipe or base in recipes() else str(Path(name).parent / base)
    below = read_experiment_file(relative, (*named_by, name))
    for known in (below.tree, below.marks):
        known.pop("name", None)  # a run is named after its own file, not after what that builds on
    return WrittenExperiment(merge(below.tree, tree), {**below.marks, **marks}, where)


def _text_of(file: str, where: str) -> str:
    """The text of an experiment's file; what is no text in it is no YAML either. Raises ExperimentError: there is none."""
    if os.path.isdir(file):
        raise ExperimentError(f"{where}: is a folder: give a YAML file in it, or a recipe ({', '.join(recipes())})")
    if not os.path.isfile(file):
        hint = did_you_mean(Path(file).stem, recipes(), f"recipes: {', '.join(recipes())}")
        raise ExperimentError(f"{where or repr(file)}: neither a recipe nor a file; {hint}")
    try:
        if os.path.getsize(file) > MAX_FILE_BYTES:
            raise ExperimentError(f"{where}: larger than {MAX_FILE_BYTES >> 20} MiB, as no experiment is: give a YAML file")
        content = Path(file).read_bytes()
        is_utf16 = content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))  # as PowerShell writes
        return content.decode("utf-16" if is_utf16 else "utf-8", errors="replace")
    except OSError as error:
        raise ExperimentError(f"{where}: cannot be read: {error.strerror}") from error
