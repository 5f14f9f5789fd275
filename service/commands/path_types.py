"""Types of arguments and options whose text names something on this machine."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from click.types import StringParamType

from service.config.experiment import parse_override
from service.config.files import recipes
from service.runs.run_directory import has_begun
from trainables.errors import ExperimentError
from trainables.object_store.store import is_uri
from trainables.redact import redact_uris


def _name(param: click.Parameter | None, ctx: click.Context | None) -> str:
    return f"{param.get_error_hint(ctx).strip(chr(39))} " if param and ctx else ""


def _check_not_empty(value: Any, param: click.Parameter | None, ctx: click.Context | None) -> None:
    """Raise ExperimentError for empty text: a shell makes it of an unset "$NAME", and as a path it is this directory."""
    if value == "":
        raise ExperimentError(f'{_name(param, ctx)}is empty: write a path, such as "." for this directory')


class PathType(click.Path):
    """A file or folder on this machine, existing or not; with `at_uri`, which gives the folder of its copy, also a URI."""

    def __init__(self, at_uri: Callable[[str], Path] | None = None, **options: Any) -> None:
        super().__init__(path_type=Path, **options)
        self.at_uri = at_uri

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        _check_not_empty(value, param, ctx)
        if not isinstance(value, str) or not is_uri(value):
            return super().convert(value, param, ctx)
        if self.at_uri is not None:
            return self.at_uri(value)
        name = _name(param, ctx)
        command = f"`distill {ctx.info_name}`" if ctx else "this"
        raise ExperimentError(f"{name}{redact_uris(value)}: {command} takes no URI here: give a path on this machine")


class MethodName(StringParamType):
    """A method or a model: its name, or FILE.py:CLASS."""


class NameOrFile(StringParamType):
    """The name of something that ships with raydistill, or a file."""


class FileOrUri(StringParamType):
    """A file or folder, its URI in an object store, or another name: of a model, published weights, a built-in source."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        _check_not_empty(value, param, ctx)
        return super().convert(value, param, ctx)


class Override(StringParamType):
    """KEY=VALUE of an experiment."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        parse_override(str(value))  # before click wonders about the rest of a value that the shell has split at its spaces
        return super().convert(value, param, ctx)


class RecipeOrFile(StringParamType):
    """An experiment, also a run's at a URI; with --keys the beginning of a key."""


class RunOrRecipe(RecipeOrFile):
    """The directory of a run, which may be on the cluster alone if its path is absolute, or an experiment."""


def is_run_folder(text: str) -> bool:
    """Whether the name of a run or an experiment is a folder's; that of a recipe is the recipe's.

    Raises ExperimentError: it is the name of a recipe and of a run's folder.
    """
    if text in recipes() and has_begun(Path(text)):
        raise ExperimentError(f"{text} is a recipe and the folder of a run: write ./{text} for the run, or rename it")
    return text not in recipes() and Path(text).is_dir()
