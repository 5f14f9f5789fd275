"""`submit`: any other command as a Ray job."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import click
from click.core import ParameterSource

from service.cluster.jobs import submit as run_submit
from service.config import strict_yaml
from service.config.dotted import put
from service.config.experiment import load, parse_override
from service.config.files import recipes
from service.config.paths import absolute, absolute_or_new, absolute_paths, with_absolute_file
from trainables.errors import ExperimentError


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.option("--follow", is_flag=True, help="Stream the job's log and exit with its exit code.")
@click.option(
    "--runs",
    "root",
    type=click.Path(path_type=Path),
    show_default="the cluster's RAYDISTILL_RUNS, or ~/runs",
    help="Root of all runs on the cluster, and of their MLflow store.",
)
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def submit(context: click.Context, follow: bool, root: Path | None, command: tuple[str, ...]) -> None:
    """Run any other command as a Ray job: distill submit --follow train digits.

    Relative paths begin in this directory, also in an experiment file and in --set. The file itself travels with the job;
    the nodes have to see all else that is named.
    """
    with tempfile.TemporaryDirectory(prefix="raydistill-") as folder:
        arguments = package(context.find_root(), command, Path(folder))
        raise click.exceptions.Exit(run_submit(arguments, Path(folder), root, follow, click.echo))


def package(distill: click.Context, words: Sequence[str], folder: Path) -> list[str]:
    """The words of a command as a job runs it, whose working directory is a copy of `folder`; an experiment file is put there.

    Raises:
        ExperimentError: no command of `distill`, or an experiment that is wrong here already.
        click.UsageError: arguments that the command does not have.
    """
    assert isinstance(distill.command, click.Group)
    names = [name for name in distill.command.list_commands(distill) if name != "submit"]
    if not words or words[0] not in names:
        raise ExperimentError(
            f"submit: give one of {', '.join(names)} and its arguments, such as `distill submit -- train digits`"
        )
    command = distill.command.get_command(distill, words[0])
    assert command is not None
    context = command.make_context(words[0], list(words[1:]), parent=distill)
    overrides: Sequence[str] = context.params.get("overrides", ())
    arguments, options = [words[0]], list[str]()
    for parameter in command.params:
        name = parameter.name or ""
        if context.get_parameter_source(name) is not ParameterSource.COMMANDLINE:
            continue
        value = context.params[name]
        texts = [_from_here(parameter, str(each)) for each in (value if isinstance(value, tuple) else (value,))]
        if isinstance(parameter, click.Argument):
            is_experiment = name in ("recipe_or_file", "directory_or_recipe") and not context.params.get("keys")
            if name == "directory_or_recipe" and Path(texts[0]).is_absolute() and not Path(texts[0]).exists():
                is_experiment = False  # a run's directory that is on the cluster alone
            arguments += [_experiment(texts[0], overrides, folder)] if is_experiment else texts
        elif isinstance(parameter, click.Option) and parameter.is_flag:
            options += parameter.opts[:1]
        elif name == "overrides":
            options += [word for text in overrides for word in _set_from_here(text)]
        else:
            options += [word for text in texts for word in (parameter.opts[0], text)]
    return [*arguments, *options]


def _set_from_here(override: str) -> list[str]:
    """An override, and right behind it, before any later one of the same key, its paths as absolute ones."""
    paths = absolute_paths(_tree(override))
    return ["--set", override, *(f"--set={key}={json.dumps(path)}" for key, path in paths.items())]


def _from_here(parameter: click.Parameter, text: str) -> str:
    """An argument as it is understood in another directory; a recipe or experiment file as it is."""
    match parameter.name:
        case "data_path":
            return absolute(text)
        case "table":
            return absolute(text) if Path(text).is_file() else text
        case "directory_or_recipe":
            return absolute_or_new(text) if Path(text).is_dir() else text
        case "name":  # of a method
            return with_absolute_file(text)
    return absolute_or_new(text) if isinstance(parameter.type, click.Path) else text


def _tree(override: str) -> dict[str, object]:
    key, value = parse_override(override)
    tree: dict[str, object] = {}
    put(tree, key, value, f"--set {override}")
    return tree


def _experiment(recipe_or_file: str, overrides: Sequence[str], folder: Path) -> str:
    """A recipe, or a run's directory; of an experiment file the name of its resolved copy in `folder`, bases and all.

    A wrong experiment is refused here, not minutes later in a log; a method's file may be on the cluster alone.
    """
    if Path(recipe_or_file).is_absolute() and Path(recipe_or_file).is_dir():
        return recipe_or_file
    experiment = load(recipe_or_file, overrides, method_files="run if present").experiment
    if recipe_or_file in recipes():
        return recipe_or_file
    tree = experiment.model_dump(mode="json")
    for key, value in absolute_paths(tree).items():
        put(tree, key, value, recipe_or_file)
    name = f"{experiment.name}.yaml"
    (folder / name).write_text(strict_yaml.dump(tree))
    return name
