"""`methods`, `check-method` and `taps`: ways to distil, and where they read models."""

import contextlib

import click
from rich.text import Text

from service.commands.options import print_all
from service.config.experiment import parse_override
from service.config.messages import with_sources
from service.config.rules import check_options
from service.runs.display import output
from trainables.errors import ExperimentError
from trainables.models.names import check_model_name

IMAGE_SIZE = click.IntRange(1, 4096)


@click.command("methods")
@click.argument("name", required=False)
def list_methods(name: str | None) -> None:
    """The ways to distil: what each adds to the loss, its default weights, where it reads the models.

    With NAME, as in distill.method or FILE.py:CLASS, all about this one, with its options.
    """
    from service.report.method_table import method_parts, method_table

    print_all((method_table(),) if name is None else method_parts(name))


@click.command()
@click.argument("model")
@click.option("--image-size", type=IMAGE_SIZE, help="Pixels a side; default: 32 for our models, 224 for the others.")
@click.option("--num-classes", type=click.IntRange(0, 10**7), default=10, show_default=True, help="0: no classifier.")
@click.option("--all", "every", is_flag=True, help="Every module's output too, not stages alone.")
def taps(model: str, image_size: int | None, num_classes: int, every: bool) -> None:
    """Points of a model that a distillation method can read: their names and shapes."""
    from service.report.model_tables import points_table

    size = image_size or (32 if check_model_name(model).library == "ours" else 224)
    output().print(points_table(model, size, num_classes, every))


@click.command("check-method")
@click.argument("name")
@click.option("--option", "options", multiple=True, metavar="KEY=VALUE", help="One of the method's options; may be repeated.")
@click.option("--student", default="resnet8", show_default=True)
@click.option("--teacher", default="resnet14", show_default=True)
@click.option("--image-size", type=IMAGE_SIZE, default=16, show_default=True, help="Pixels a side.")
def check_method(name: str, options: tuple[str, ...], student: str, teacher: str, image_size: int) -> None:
    """Whether a method keeps the contract: NAME as in distill.method, or FILE.py:CLASS.

    \b
    Example:  distill check-method my_method.py:Margin --option weight=2
    """
    values = dict(parse_override(option, "--option") for option in options)
    try:
        check_options(name, values)
    except ExperimentError as error:
        raise with_sources(error, "--option") from error
    for model in (student, teacher):
        check_model_name(model)
    from trainables.distributed.rank_pool import RankPool
    from trainables.engine.check_method import Case, check

    num_broken = 0
    with contextlib.closing(RankPool()) as ranks:
        for title, problem in check(Case(name, values, student, teacher, image_size), ranks.run):
            mark = ("failed", "red") if problem else ("    ok", "green")
            output().print(Text.assemble(mark, f"  {title}" + (f": {problem}" if problem else "")), soft_wrap=True)
            num_broken += bool(problem)
    if num_broken:
        raise ExperimentError(f"{name} does not keep the contract of a method in {num_broken} of the points above")
