"""The ways to distil, by name. Importing this costs no torch: a method is loaded when it, or its options, are asked for."""

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
from typing import TYPE_CHECKING

from trainables.errors import ExperimentError, near

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
"""Ours: name → `module:class`."""

ENTRY_POINTS = "raydistill.methods"
"""The group of entry points under which a package offers methods of its own."""


@cache
def offered() -> dict[str, dict[str, str]]:
    """Every method that goes by a name → the package that offers it → `module:class`. Of several packages none is preferred."""
    found = {name: {"raydistill": place} for name, place in METHODS.items()}
    for entry in importlib.metadata.entry_points(group=ENTRY_POINTS):
        package = entry.dist.name if entry.dist is not None else entry.module
        found.setdefault(entry.name, {})[package] = entry.value
    return found


def key_of(name: str) -> str:
    """What a method is called in `distill.options` and in the records: its name, or of `FILE.py:CLASS` the class."""
    return name.rpartition(":")[2]


_copies: dict[str, Path] = {}


def use_copies(copies: Mapping[str, Path]) -> None:
    """From here on this process loads each of these method files, by the names that an experiment has, from its copy."""
    _copies.clear()
    _copies.update(copies)


def file_of(name: str) -> Path | None:
    """The file that a name `FILE.py:CLASS` means, or its copy, see `use_copies`; None for any other name."""
    file, colon, _ = name.rpartition(":")
    return _copies.get(file, Path(file)) if colon and file.endswith(".py") else None


def source_of(name: str) -> tuple[Path, str, str] | None:
    """The file that a name `FILE.py:CLASS` means, its text and the text's SHA-256, without running it; None for any other name.

    Raises:
        ExperimentError: the file cannot be read.
    """
    file = file_of(name)
    if file is None:
        return None
    try:
        content = file.read_bytes()
    except OSError as error:
        raise ExperimentError(f"distill.method: {file} cannot be read: {error.strerror}") from error
    return file, content.decode(errors="surrogateescape"), hashlib.sha256(content).hexdigest()


def check_name(name: str, where: str = "distill.method") -> None:
    """Refuse a method that does not exist, without loading it. `where` is the key that names it.

    Raises:
        ExperimentError: one line with what to write instead.
    """
    file = file_of(name)
    if file is not None:
        if not file.is_file():
            raise ExperimentError(f"{where}: there is no file {file}: give the path of a Python file, as FILE.py:CLASS")
        return
    if name in METHODS:  # without a look at what all installed packages offer
        return
    known = offered()
    if name not in known:
        similar = near(name.lower(), known)
        instead = f"did you mean {similar[0]}?" if similar else f"write one of {', '.join(sorted(known))}, or FILE.py:CLASS"
        raise ExperimentError(f"{where}: there is no method {name!r}; {instead}")


def load(name: str) -> type[Method]:
    """The class of a method. Imports torch, and where the method is a user's, their code.

    Raises:
        ExperimentError: it does not exist, is no method, or is offered by several packages; one line.
    """
    from trainables.config import MethodOptions
    from trainables.methods.contract import Method

    check_name(name)
    file = file_of(name)
    places = offered()[name] if file is None else {}
    if len(places) > 1:
        both = " and ".join(f"{package} ({place})" for package, place in places.items())
        raise ExperimentError(
            f"distill.method: {name} is offered by {both}: uninstall all but one, or write the one that is meant as FILE.py:CLASS"
        )
    try:
        found = pkgutil.resolve_name(*places.values()) if file is None else getattr(_module(file.resolve()), key_of(name))
    except (Exception, SystemExit) as error:  # a user's module may fail in any way
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ExperimentError(f"distill.method: {name} cannot be loaded ({reason})") from error
    if not (inspect.isclass(found) and issubclass(found, Method)):
        raise ExperimentError(
            f"distill.method: {name} is no method: write a class that inherits from trainables.methods.contract.Method"
        )
    if not (inspect.isclass(found.Options) and issubclass(found.Options, MethodOptions)):
        raise ExperimentError(f"distill.method: {name} has Options that do not inherit from trainables.config.MethodOptions")
    if not isinstance(getattr(found, "terms", None), tuple):
        raise ExperimentError(f"distill.method: {name} has no tuple `terms`: write one with the names of what forward returns")
    return found


@cache
def _module(file: Path) -> ModuleType:
    """What a user's file holds, of which it may be several methods: it is run once."""
    name = f"raydistill_{file.stem}_{hashlib.sha256(os.fsencode(file)).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where pickle and dataclasses look a class's module up
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
