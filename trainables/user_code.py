"""User-defined methods and models, FILE.py:CLASS: read a file without running it, or import it when its class is needed."""

import hashlib
import importlib.util
import os
import re
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from trainables.config.models import ARGUMENTS, FOLDER_SCHEME
from trainables.errors import ExperimentError

MODULE_PREFIX = "raydistill_file_"
"""Prefix of the module names of user files."""
_copies: dict[str, Path] = {}
"""See `use_copies`."""


class CodeSource(NamedTuple):
    """The source file of a user's method or model."""

    path: Path
    text: str
    sha256: str
    """Hexadecimal SHA-256 of the file's bytes."""


def option_key(name: str) -> str:
    """Return a method's key in `distill.options` and in the records: its name, or the class of `FILE.py:CLASS`.

    For a model `FILE.py:CLASS(key=value)` this is the class with its arguments.
    """
    return name.rpartition(".py:")[2]


def use_copies(copies: Mapping[str, Path]) -> None:
    """Make this process read and import files from their copies. `copies` maps a path in an experiment to its copy."""
    _copies.clear()
    _copies.update(copies)


def file_of(name: str) -> Path | None:
    """Return the file of a method or model `FILE.py:CLASS`, or its copy (see `use_copies`); None for any other name."""
    file, found, _ = name.rpartition(".py:")
    path = Path(f"{file}.py")
    return _copies.get(str(path), path) if found else None


def read_source(name: str, key: str = "distill.method") -> CodeSource | None:
    """Read the file of a method or model `FILE.py:CLASS` without running it; None for any other name. `key` is for messages.

    Raises ExperimentError: the file cannot be read, or is not UTF-8.
    """
    path = file_of(name)
    if path is None:
        return None
    try:
        content = path.read_bytes()
        return CodeSource(path, content.decode(), hashlib.sha256(content).hexdigest())
    except UnicodeDecodeError:
        raise ExperimentError.of_key(key, f"{path} is not UTF-8: save it as UTF-8") from None
    except OSError as error:
        raise ExperimentError.of_key(key, f"{path} cannot be read ({error.strerror}): give the path of a Python file") from error


def model_parts(name: str) -> tuple[str, ...]:
    """Split a name into one model, or the two of STUDENT+TEACHER. An existing path that contains + is not split."""
    pluses = [match.start() for match in re.finditer(r"\+(?![^(]*\))", name)]  # not those within arguments
    cuts = [(name[:at], name[at + 1 :]) for at in pluses]
    if not cuts or ((path := _path_of(name)) is not None and path.exists()):
        return (name,)
    found = next((cut for cut in cuts if all((path := _path_of(part)) is None or path.exists() for part in cut)), None)
    return found or ((name,) if name.startswith((os.sep, FOLDER_SCHEME)) else cuts[0])


def _path_of(name: str) -> Path | None:
    """Return the file or folder of a model, or None."""
    written = ARGUMENTS.fullmatch(name)
    base = written[1] if written else name
    if base.startswith(FOLDER_SCHEME):
        return Path(base.removeprefix(FOLDER_SCHEME))
    return Path(base) if "+" in option_key(base) else file_of(base)  # a class name has no +


@cache
def module_of(file: Path) -> ModuleType:
    """Import a user's file. The file runs once, even if it defines several methods."""
    name = f"{MODULE_PREFIX}{file.stem}_{hashlib.sha256(os.fsencode(file)).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # pickle and dataclasses look up a class's module there
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
