"""Arguments and options that several commands have, their types, and a printer for tables and lines."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource
from click.types import StringParamType

from service.config.experiment import parse_override
from service.config.files import recipes
from service.runs.display import output
from service.runs.run_directory import has_begun
from service.runs.stored.stored_runs import fetch_records, root_folder, run_folder
from trainables.errors import ExperimentError
from trainables.object_store.store import is_uri
from trainables.redact import redact_uris
from trainables.rundir import RunDir, expand_home

if TYPE_CHECKING:
    from rich.console import RenderableType


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


def default_runs_root() -> Path | str:
    """`RAYDISTILL_RUNS`, also a URI, else `runs/` here; inside a Ray job, whose working directory is thrown away, `~/runs`."""
    if named := os.environ.get("RAYDISTILL_RUNS"):
        if is_uri(named):
            return named
        return expand_home(named).absolute()
    here = Path.cwd()
    return Path.home() / "runs" if "runtime_resources" in here.parts else here / "runs"


FC = TypeVar("FC", bound="Callable[..., Any] | click.Command")
RECIPE = click.argument("recipe_or_file", type=RecipeOrFile())
DIR = click.argument("directory", type=PathType(run_folder))
SET = click.option(
    "--set",
    "overrides",
    type=Override(),
    multiple=True,
    metavar="KEY=VALUE",
    help="Change one value, such as data.global_batch_size=256.",
)
OUT = click.option("--out", type=PathType(run_folder), help="Run directory, or s3://…/RUN; default: ROOT/<name>-<time>.")


def runs_option(kind: PathType, help_text: str) -> Callable[[FC], FC]:
    """`--runs`, which may be, by its type, a URI."""
    return click.option(
        "--runs", "root", type=kind, default=default_runs_root, show_default="RAYDISTILL_RUNS or runs/", help=help_text
    )


RUNS = runs_option(PathType(), "Root of all runs and of their MLflow store.")
RUNS_OR_URI = runs_option(PathType(root_folder), "Root of all runs and of their MLflow store, or s3://BUCKET/PREFIX.")
DATA_PATH = "As data.path: digits, synthetic, a packed set, an image folder or another layout."
PROCESSES = click.option(
    "--processes", type=click.IntRange(min=1), help="Processes on this machine; default: one per core. The result is the same."
)


def is_given(parameter: str) -> bool:
    """Whether the user gave this option of the running command, even with its default value."""
    return click.get_current_context().get_parameter_source(parameter) is ParameterSource.COMMANDLINE


def check_given(*rules: str) -> None:
    """Refuse options of the running command that break a rule: `--a needs --b`, or `--a excludes --b`."""
    names = {option: each.name or "" for each in click.get_current_context().command.params for option in each.opts}
    for rule in rules:
        option, verb, other = rule.split()
        if is_given(names[option]) and is_given(names[other]) is (verb == "excludes"):
            remedy = "give one of them" if verb == "excludes" else f"add {other}, or leave {option} out"
            raise click.UsageError(f"{option} {verb} {other}: {remedy}")


def experiment_file(text: str) -> str:
    """A recipe or file as it is; of the URI of a run, or of its experiment, the experiment's copy on this machine.

    Raises ExperimentError: there is no run.
    """
    if not is_uri(text):
        return text
    folder = run_folder(text.removesuffix("/experiment.yaml"))
    fetch_records(folder)
    file = RunDir(folder).experiment
    if not file.is_file():
        raise ExperimentError(f"{text} holds no run: give a recipe, a file, or s3://BUCKET/PREFIX/RUN/experiment.yaml")
    return str(file)


def print_all(parts: Iterable[RenderableType]) -> None:
    """Print tables and lines; a line longer than the terminal is not broken."""
    for part in parts:
        output().print(part, soft_wrap=isinstance(part, str))
