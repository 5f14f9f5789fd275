"""Installed packages that offer methods."""

import contextlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path

from trainables.methods.registry import ENTRY_POINTS, available_methods


@contextlib.contextmanager
def installed(folder: Path, package: str, name: str, code: str) -> Iterator[None]:
    """A package whose module, `package` with an underscore before it, holds `code` and offers its class Mine as `name`."""
    about = folder / f"{package}-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[{ENTRY_POINTS}]\n{name} = _{package}:Mine\n")
    (folder / f"_{package}.py").write_text(code)
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    available_methods.cache_clear()
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        sys.modules.pop(f"_{package}", None)
        importlib.invalidate_caches()
        available_methods.cache_clear()
