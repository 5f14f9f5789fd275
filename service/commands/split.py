"""`split`: where a model would be cut for several devices."""

import click

from service.commands.options import RECIPE, SET, print_all
from service.config.batch_size import refuse_auto
from service.config.experiment import load


@click.command()
@RECIPE
@SET
@click.option("--stages", type=click.IntRange(2, 64), help="Devices that share a student; default: scale.pipeline_stages, or 2.")
def split(recipe_or_file: str, overrides: tuple[str, ...], stages: int | None) -> None:
    """Where the student is best cut into pipeline stages, by timing its parts on this machine.

    \b
    Example:  distill split cifar100 --stages 2
    """
    from service.report.model_tables import split_parts, student_in_stages

    experiment = load(recipe_or_file, overrides, method_files="ignore").experiment
    refuse_auto(experiment, "split")
    print_all(split_parts(student_in_stages(experiment, stages or max(2, experiment.scale.pipeline_stages))))
