"""What a format is for this package: how it is written, and the Python that reads it without this package."""

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
    """The format of this name in EXPORTS."""
    found: Format = pkgutil.resolve_name(f"trainables.export.{EXPORTS[name]}")
    return found


class Format(NamedTuple):
    """A way to write a student down."""

    file: str
    """Its name in the folder of an export."""
    write: Callable[[Student, Path, bool], dict[str, Any]]
    """Write the file; the last argument: whether it prepares uint8 images itself. What it returns goes into export.json.

    Raises ExportError: the format cannot have this student.
    """
    lines: Callable[[Student, Path], list[str]]
    """Python that reads the file at this path; the last line makes `output` of `images`, a numpy array (B, C, H, W).

    These lines are run for the comparison, and printed. Raises ExportError.
    """
    packages: tuple[str, ...] = ()
    """Those that it needs besides torch."""
    is_traced: bool = False
    """Whether the file has what the model computes, not its parameters alone."""

    def check(self, student: Student, name: str) -> None:
        """Raises ExportError: a package is missing, or the classifier is none of the student's library."""
        if missing := [package for package in self.packages if not installed(package)]:
            extra = {"timm": "timm"}.get(missing[0], "export")
            raise ExportError(f"--to {name} needs {', '.join(missing)}: `pip install raydistill[{extra}]`")
        if not self.is_traced and hasattr(student.module, COSINES):
            raise ExportError(
                f"{student.model} has class embeddings as its classifier, which {name} has no keys for: write --to onnx or "
                "torch_export"
            )
