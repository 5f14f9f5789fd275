"""The distillation methods by name. Importing this does not import torch: a method is loaded when its class is needed.

A user's method, FILE.py:CLASS, is imported in `load_method` and nowhere else. `check_name` and `read_source` do not run its file.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import inspect
import os
import pkgutil
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from trainables.errors import ExperimentError, did_you_mean

if TYPE_CHECKING:
    from trainables.methods.contract import Method

METHODS: dict[str, str] = {
    "ab": "trainables.methods.ab:AB",
    "at": "trainables.methods.at:AT",
    "cc": "trainables.methods.cc:CC",
    "crd": "trainables.methods.crd:CRD",
    "dist": "trainables.methods.dist:DIST",
    "dkd": "trainables.methods.dkd:DKD",
    "dml": "trainables.methods.dml:DML",
    "fitnet": "trainables.methods.fitnet:FitNet",
    "fsp": "trainables.methods.fsp:FSP",
    "ft": "trainables.methods.ft:FT",
    "irg": "trainables.methods.irg:IRG",
    "kd": "trainables.methods.kd:KD",
    "kdsvd": "trainables.methods.kdsvd:KDSVD",
    "mlkd": "trainables.methods.mlkd:MLKD",
    "nkd": "trainables.methods.nkd:NKD",
    "nst": "trainables.methods.nst:NST",
    "ofd": "trainables.methods.ofd:OFD",
    "pkt": "trainables.methods.pkt:PKT",
    "pskd": "trainables.methods.pskd:PSKD",
    "reviewkd": "trainables.methods.reviewkd:ReviewKD",
    "rkd": "trainables.methods.rkd:RKD",
    "semckd": "trainables.methods.semckd:SemCKD",
    "simkd": "trainables.methods.simkd:SimKD",
    "sp": "trainables.methods.sp:SP",
    "srrl": "trainables.methods.srrl:SRRL",
    "ttm": "trainables.methods.ttm:TTM",
    "vid": "trainables.methods.vid:VID",
}
"""The built-in methods: name → `module:class`."""

ENTRY_POINTS = "raydistill.methods"
"""The group of entry points in which a package declares methods."""


_copies: dict[str, Path] = {}
"""See `use_copies`."""


class MethodSource(NamedTuple):
    """The file of a user's method."""

    path: Path
    text: str
    sha256: str
    """Of the file's bytes, in hexadecimal."""


@cache
def available_methods() -> dict[str, dict[str, str]]:
    """Every method that has a name → the packages that declare it → `module:class`. No package overrides another."""
    found = {name: {"raydistill": target} for name, target in METHODS.items()}
    for entry in importlib.metadata.entry_points(group=ENTRY_POINTS):
        package = entry.dist.name if entry.dist is not None else entry.module
        found.setdefault(entry.name, {})[package] = entry.value
    return found


def option_key(name: str) -> str:
    """The key of a method in `distill.options` and in the records: its name, or the class of `FILE.py:CLASS`."""
    return name.rpartition(":")[2]


def use_copies(copies: Mapping[str, Path]) -> None:
    """From now on this process reads and loads these files from their copies: path in an experiment → copy."""
    _copies.clear()
    _copies.update(copies)


def file_of(name: str) -> Path | None:
    """The file of a method `FILE.py:CLASS`, or its copy, see `use_copies`; None for any other name."""
    file, colon, _ = name.rpartition(":")
    return _copies.get(str(Path(file)), Path(file)) if colon and file.endswith(".py") else None


def read_source(name: str) -> MethodSource | None:
    """The file of a method `FILE.py:CLASS`, read without running it; None for any other name.

    Raises:
        ExperimentError: the file cannot be read, or is not UTF-8; one line.
    """
    path = file_of(name)
    if path is None:
        return None
    try:
        content = path.read_bytes()
        return MethodSource(path, content.decode(), hashlib.sha256(content).hexdigest())
    except UnicodeDecodeError:
        raise ExperimentError.of_key("distill.method", f"{path} is not UTF-8: save the file in that encoding") from None
    except OSError as error:
        raise ExperimentError.of_key(
            "distill.method", f"{path} cannot be read ({error.strerror}): give the path of a Python file"
        ) from error


def check_name(name: str, where: str = "distill.method") -> None:
    """Refuse a method that does not exist, without loading it. `where` is the option that names it.

    Raises:
        ExperimentError: one line with what to write instead.
    """
    file = file_of(name)
    if file is not None:
        if not file.is_file():
            raise ExperimentError.of_key(where, f"there is no file {file}: give the path of a Python file, as FILE.py:CLASS")
        return
    if name in METHODS:  # without reading the entry points of all installed packages
        return
    known = available_methods()
    if name not in known:
        instead = did_you_mean(name.lower(), known, f"write one of {', '.join(sorted(known))}, or FILE.py:CLASS")
        raise ExperimentError.of_key(where, f"there is no method {name!r}; {instead}")


def load_method(name: str) -> type[Method]:
    """The class of a method. Imports torch, and runs a user's file.

    Raises:
        ExperimentError: it does not exist, is no method, or is declared by several packages; one line.
    """
    check_name(name)
    file = file_of(name)
    targets = available_methods()[name] if file is None else {}
    if len(targets) > 1:
        packages = " and ".join(f"{package} ({target})" for package, target in targets.items())
        raise ExperimentError.of_key(
            "distill.method",
            f"{name} is offered by {packages}: uninstall all but one, or write the one that is meant as FILE.py:CLASS",
        )
    try:
        if file is None:
            (method_class,) = map(pkgutil.resolve_name, targets.values())
        else:
            method_class = getattr(_module(file.resolve()), option_key(name))
    except (Exception, SystemExit) as error:  # a user's module may fail in any way
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ExperimentError.of_key("distill.method", f"{name} cannot be loaded ({reason})") from error
    return _checked(name, method_class)


def _checked(name: str, method_class: Any) -> type[Method]:
    """The class, where it is a method with its declarations."""
    from trainables.config import MethodOptions
    from trainables.methods.contract import Method

    if not (inspect.isclass(method_class) and issubclass(method_class, Method)):
        raise ExperimentError.of_key(
            "distill.method", f"{name} is no method: write a class that inherits from trainables.methods.contract.Method"
        )
    if not (inspect.isclass(method_class.Options) and issubclass(method_class.Options, MethodOptions)):
        raise ExperimentError.of_key(
            "distill.method", f"{name} has Options that do not inherit from trainables.config.MethodOptions"
        )
    if not isinstance(getattr(method_class, "terms", None), tuple):
        raise ExperimentError.of_key(
            "distill.method", f"{name} has no tuple `terms`: write one with the names of what forward returns"
        )
    return method_class


@cache
def _module(file: Path) -> ModuleType:
    """The module of a user's file. The file runs once, also where it has several methods."""
    name = f"raydistill_{file.stem}_{hashlib.sha256(os.fsencode(file)).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where pickle and dataclasses look up the module of a class
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
