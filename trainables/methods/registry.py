"""Look up distillation methods by name. Importing this module does not import torch; a method is loaded on demand."""

from __future__ import annotations

import importlib.metadata
import inspect
import pkgutil
from functools import cache
from typing import TYPE_CHECKING, Any, cast

from trainables.errors import ExperimentError, did_you_mean
from trainables.user_code import file_of, module_of, option_key

if TYPE_CHECKING:
    from trainables.methods.contract import Method

METHODS: dict[str, str] = {
    "ab": "AB",
    "at": "AT",
    "cc": "CC",
    "crd": "CRD",
    "dist": "DIST",
    "dkd": "DKD",
    "dml": "DML",
    "embed": "Embed",
    "fitnet": "FitNet",
    "fsp": "FSP",
    "ft": "FT",
    "irg": "IRG",
    "kd": "KD",
    "kdsvd": "KDSVD",
    "mlkd": "MLKD",
    "nkd": "NKD",
    "nst": "NST",
    "ofd": "OFD",
    "pkt": "PKT",
    "pskd": "PSKD",
    "queue": "Queue",
    "reviewkd": "ReviewKD",
    "rkd": "RKD",
    "semckd": "SemCKD",
    "simkd": "SimKD",
    "sp": "SP",
    "srrl": "SRRL",
    "ttm": "TTM",
    "vid": "VID",
}
"""Built-in methods: name, which is also the module's → class."""

ENTRY_POINTS = "raydistill.methods"
"""The entry point group in which packages declare methods."""


@cache
def available_methods() -> dict[str, dict[str, str]]:
    """Map each method name to the packages that declare it and their `module:class`. No package overrides another."""
    found = {name: {"raydistill": f"trainables.methods.{name}:{kind}"} for name, kind in METHODS.items()}
    for entry in importlib.metadata.entry_points(group=ENTRY_POINTS):
        package = entry.dist.name if entry.dist is not None else entry.module
        found.setdefault(entry.name, {})[package] = entry.value
    return found


def check_name(name: str, where: str = "distill.method") -> None:
    """Raise ExperimentError if a method does not exist, without loading it. `where` is the option that names it."""
    file = file_of(name)
    if file is not None:
        if not file.is_file():
            raise ExperimentError.of_key(where, f"there is no file {file}: give the path of a Python file, as FILE.py:CLASS")
        return
    if name in METHODS:  # saves reading the entry points of all installed packages
        return
    known = available_methods()
    if name not in known:
        instead = did_you_mean(name.lower(), known, f"write one of {', '.join(sorted(known))}, or FILE.py:CLASS")
        raise ExperimentError.of_key(where, f"there is no method {name!r}; {instead}")


def load_method(name: str) -> type[Method]:
    """Load a method's class. This imports torch, and runs a user's file.

    Raises ExperimentError: the method does not exist, is not a valid method, or is declared by several packages.
    """
    check_name(name)
    file = file_of(name)
    targets = available_methods()[name] if file is None else {}
    if len(targets) > 1:
        packages = " and ".join(f"{package} ({target})" for package, target in targets.items())
        raise ExperimentError.of_key(
            "distill.method",
            f"{name} is declared by {packages}: uninstall all but one, or write the intended one as FILE.py:CLASS",
        )
    try:
        if file is None:
            (method_class,) = map(pkgutil.resolve_name, targets.values())
        else:
            method_class = getattr(module_of(file.resolve()), option_key(name))
    except (Exception, SystemExit) as error:  # a user's module may raise anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ExperimentError.of_key("distill.method", f"{name} cannot be loaded ({reason})") from error
    return _checked(name, method_class)


def _checked(name: str, method_class: Any) -> type[Method]:
    """Check that the class is a method with valid declarations. Raises ExperimentError."""
    from trainables.config import InitStageOptions, MethodOptions
    from trainables.methods.contract import Method

    options, problem = getattr(method_class, "Options", None), None
    if not (inspect.isclass(method_class) and issubclass(method_class, Method)):
        problem = "is not a method: inherit from trainables.methods.contract.Method"
    elif not (inspect.isclass(options) and issubclass(options, MethodOptions)):
        problem = "has Options that are not a MethodOptions: inherit them from trainables.config.MethodOptions"
    elif not isinstance(getattr(method_class, "terms", None), tuple):
        problem = "has no tuple `terms`: add one with the names of the terms that forward returns"
    elif method_class.init_terms and not issubclass(options, InitStageOptions):
        problem = "has init_terms, but Options without init_epochs: inherit them from trainables.config.InitStageOptions"
    if problem is not None:
        raise ExperimentError.of_key("distill.method", f"{name} {problem}")
    return cast("type[Method]", method_class)
