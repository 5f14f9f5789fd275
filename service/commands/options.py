"""Arguments and options that several commands have, and a printer for tables and lines."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from service.commands.path_types import Override, PathType, RecipeOrFile
from service.runs.display import output
from service.runs.stored.stored_runs import fetch_records, root_folder, run_folder
from trainables.errors import ExperimentError
from trainables.object_store.store import is_uri
from trainables.rundir import RunDir, expand_home

if TYPE_CHECKING:
    from rich.console import RenderableType


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
