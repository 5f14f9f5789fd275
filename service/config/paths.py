"""Paths of an experiment as processes that run elsewhere understand them."""

from __future__ import annotations

from trainables.methods import file_of, option_key
from trainables.rundir import expanded


def absolute(data_path: str) -> str:
    """The absolute path of a file or folder that exists; a name of a built-in source, or whatever is not there, as it is."""
    path = expanded(data_path)
    return str(path.absolute()) if path.exists() else data_path


def with_absolute_file(method: str) -> str:
    """A method's name; that of a method in a file, `FILE.py:CLASS`, with the file's absolute path."""
    file = file_of(method)
    return method if file is None else f"{file.absolute()}:{option_key(method)}"
