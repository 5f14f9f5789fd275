"""The distillation methods by name. Importing this does not import torch: a method is loaded when its class is needed."""

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
"""The built-in methods: the name, which is also that of the file → the class."""

ENTRY_POINTS = "raydistill.methods"
"""The group of entry points in which a package declares methods."""


@cache
def available_methods() -> dict[str, dict[str, str]]:
    """Every method that has a name → the packages that declare it → `module:class`. No package overrides another."""
    found = {name: {"raydistill": f"trainables.methods.{name}:{kind}"} for name, kind in METHODS.items()}
    for entry in importlib.metadata.entry_points(group=ENTRY_POINTS):
        package = entry.dist.name if entry.dist is not None else entry.module
        found.setdefault(entry.name, {})[package] = entry.value
    return found


def check_name(name: str, where: str = "distill.method") -> None:
    """Refuse a method that does not exist, without loading it. `where` is the option that names it. Raises ExperimentError."""
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

    Raises ExperimentError: it does not exist, is no method, or is declared by several packages.
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
            method_class = getattr(module_of(file.resolve()), option_key(name))
    except (Exception, SystemExit) as error:  # a user's module may fail in any way
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise ExperimentError.of_key("distill.method", f"{name} cannot be loaded ({reason})") from error
    return _checked(name, method_class)


def _checked(name: str, method_class: Any) -> type[Method]:
    """The class, where it is a method with its declarations."""
    from trainables.config import InitStageOptions, MethodOptions
    from trainables.methods.contract import Method

    options, problem = getattr(method_class, "Options", None), None
    if not (inspect.isclass(method_class) and issubclass(method_class, Method)):
        problem = "is no method: write a class that inherits from trainables.methods.contract.Method"
    elif not (inspect.isclass(options) and issubclass(options, MethodOptions)):
        problem = "has Options that do not inherit from trainables.config.MethodOptions"
    elif not isinstance(getattr(method_class, "terms", None), tuple):
        problem = "has no tuple `terms`: write one with the names of what forward returns"
    elif method_class.init_terms and not issubclass(options, InitStageOptions):
        problem = "has init_terms, and Options without their epochs: inherit them from trainables.config.InitStageOptions"
    if problem is not None:
        raise ExperimentError.of_key("distill.method", f"{name} {problem}")
    return cast("type[Method]", method_class)
