"""The interface of an export format: how to write it, and Python code that loads it without this package."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from trainables.errors import ExportError
from trainables.export import EXPORTS
from trainables.export.student import Student
from trainables.models.forward import COSINES
from trainables.models.libraries.interface import installed


def format_of(name: str) -> Format:
    """Return the format with this name in EXPORTS."""
    found: Format = pkgutil.resolve_name(f"trainables.export.{EXPORTS[name]}")
    return found


class Format(NamedTuple):
    """A format that a student can be exported to."""

    file: str
    """The file's name in the export folder."""
    write: Callable[[Student, Path, bool], dict[str, Any]]
    """Writes the file and returns entries for export.json. The last argument: whether the file prepares uint8 images itself.

    Raises ExportError: the format does not support this student.
    """
    lines: Callable[[Student, Path], list[str]]
    """Python code that loads the file; the last line computes `output` from `images`, a numpy array (B, C, H, W).

    The comparison runs these lines, and they are printed. Raises ExportError.
    """
    packages: tuple[str, ...] = ()
    """Required packages besides torch."""
    is_traced: bool = False
    """Whether the file has the model's operations, not just its parameters."""

    def check(self, student: Student, name: str) -> None:
        """Raises ExportError: a package is missing, or the format has no place for the student's class embeddings."""
        if missing := [package for package in self.packages if not installed(package)]:
            extra = {"timm": "timm"}.get(missing[0], "export")
            raise ExportError(f"--to {name} needs {', '.join(missing)}: `pip install raydistill[{extra}]`")
        if not self.is_traced and hasattr(student.module, COSINES):
            raise ExportError(
                f"{student.model} has class embeddings as its classifier, which {name} cannot store: choose --to onnx or "
                "torch_export"
            )
