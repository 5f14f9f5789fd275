"""`recipes` and `show`: what there is to run, and every value of an experiment."""

import json
from collections.abc import Sequence
from pathlib import Path

import click
from rich.text import Text

from service.commands.options import SET, RecipeOrFile, check_given, experiment_file
from service.config.batch_size import AUTO
from service.config.dotted import flatten
from service.config.experiment import load
from service.config.files import recipes
from service.config.reference import keys_below
from service.config.schema import Experiment
from service.config.space import GLOBAL_BATCH
from service.runs.display import output
from service.runs.run_directory import decided_keys
from service.runs.stored.stored_runs import display_name
from trainables.errors import DistillError


@click.command("recipes")
def list_recipes() -> None:
    """The experiments that ship with raydistill."""
    lines = click.HelpFormatter(width=output().width)
    lines.write_dl([*recipes().items()])
    click.echo(lines.getvalue(), nl=False)


@click.command()
@click.argument("recipe_or_file", type=RecipeOrFile(), required=False)
@SET
@click.option("--keys", "keys", is_flag=True, help="List all keys, or those below the key that is given instead.")
def show(recipe_or_file: str | None, overrides: tuple[str, ...], keys: bool) -> None:
    """The resolved experiment, each value with where it comes from; --keys: every key.

    \b
    distill show digits --set optim.lr=0.2
    distill show --keys             all keys of an experiment: type, default, meaning
    distill show --keys optim       those of one section
    """
    check_given("--keys excludes --set")
    if keys:
        print_keys(recipe_or_file or "")
    elif recipe_or_file is None:
        raise click.UsageError("give a recipe or a file, or --keys")
    else:
        print_values(experiment_file(recipe_or_file), overrides)


def print_keys(prefix: str) -> None:
    """Name, type and default of each key, and its meaning in a line of its own."""
    console = output()
    for key in keys_below(prefix):
        default = {"": "", "required": "  required"}.get(key.default, f"  default {key.default}")
        console.print(Text.assemble((key.name, "bold"), f"  {key.type}{default}\n    {key.meaning}"), soft_wrap=True)


def print_values(recipe_or_file: str, overrides: Sequence[str]) -> None:
    resolved = load(recipe_or_file, overrides, method_files="ignore")
    flat = flatten(resolved.experiment.model_dump(mode="json"))
    path = Path(recipe_or_file)
    name = display_name(path) if path.is_file() else recipe_or_file
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in flat.items()}
    sources = dict(resolved.sources)
    for key, source in decided_keys(path).items():
        if sources.get(key, "").startswith(f"{recipe_or_file}:"):
            sources[key] = source
    comments = {key: f"# {sources.get(key, 'default').replace(recipe_or_file, name)}" for key in texts}
    left, middle, right = (max(map(len, column.values())) for column in ({key: key for key in texts}, texts, comments))
    middle = min(60, middle, max(10, output().width - left - right - 4))
    for key, text in texts.items():
        click.echo(f"{key:{left}}  {text:{middle}}  {comments[key]}")
    if flat[GLOBAL_BATCH] == AUTO:
        click.echo(f"# {GLOBAL_BATCH} is decided when `distill train` begins: it times batches")
    for line in model_inputs(resolved.experiment):
        click.echo(f"# {line}")


def model_inputs(experiment: Experiment) -> list[str]:
    """What the student and each teacher with given weights see, a line each; of one whose weights cannot be read, why."""
    from trainables.models.model_input import student_input, teacher_input  # a library's record imports the library

    lines = [f"student {experiment.student.model} sees {student_input(experiment.data)}"]
    for each in experiment.all_teachers:
        if each.weights is not None:
            try:
                lines.append(f"teacher {each.model} sees {teacher_input(each, experiment.data)}")
            except DistillError as error:
                lines.append(f"teacher {each.model}: {error}")
    return lines
