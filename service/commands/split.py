"""`split`: where a model would be cut for several devices."""

from __future__ import annotations

import click

from service.commands.options import RECIPE, SET, print_all
from service.config.experiment import load
from service.report.split_table import split_parts
from service.runs.display import output
from service.runs.dry_run import num_classes_of


@click.command()
@RECIPE
@SET
@click.option("--stages", type=click.IntRange(2, 64), default=2, show_default=True, help="Devices that share one student.")
@click.option(
    "--link", type=click.FloatRange(min=0, min_open=True), default=10.0, show_default=True, help="GB/s between two of them."
)
def split(recipe_or_file: str, overrides: tuple[str, ...], stages: int, link: float) -> None:
    """Where the student could be cut into pipeline stages, what each part costs on this machine, and the best cut.

    \b
    Example:  distill split cifar100 --stages 2
    """
    experiment = load(recipe_or_file, overrides, method_files="ignore").experiment
    num_classes = num_classes_of(experiment.data.path, experiment.data.synthetic_classes)
    print_all(output(), split_parts(experiment, num_classes, stages, link))
