"""`split`: where a model would be cut for several devices."""

from collections.abc import Sequence

import click

from service.commands.options import RECIPE, SET, print_all
from service.config.experiment import load
from service.runs.display import output


@click.command()
@RECIPE
@SET
@click.option("--stages", type=click.IntRange(2, 64), help="Devices that share a student; default: scale.pipeline_stages, or 2.")
@click.option("--cut", metavar="NAME,NAME", help="Modules with which the later stages begin; default: the fastest cut.")
@click.option("--link", type=click.FloatRange(min=0, min_open=True), metavar="GB/S", help="Speed from one device to the next.")
@click.option("--list", "only_list", is_flag=True, help="All cut points, without timing.")
def split(
    recipe_or_file: str, overrides: tuple[str, ...], stages: int | None, cut: str | None, link: float | None, only_list: bool
) -> None:
    """Where the student is best cut into pipeline stages, by timing its parts on this machine, and whether that helps.

    \b
    Examples:  distill split cifar100 --stages 2
               distill split cifar100 --list
               distill split cifar100 --cut layer2
    """
    if cut is not None and stages is not None:
        raise click.UsageError(f"--stages and --cut: give one of them, as --cut {cut} makes {cut.count(',') + 2} stages")
    if only_list and (cut or link):
        raise click.UsageError("--list: times nothing: leave out --cut and --link")
    from service.report.split_table import cut_point_table, split_parts, student_in_stages

    experiment = load(recipe_or_file, overrides, method_files="ignore").experiment
    scale = experiment.scale
    if cut is not None:
        cuts: Sequence[str] | None = [name.strip() for name in cut.split(",")]
        stages = cut.count(",") + 2
    else:
        stages = stages or max(2, scale.num_stages)
        cuts = scale.cut if stages == scale.num_stages else None
    config = student_in_stages(experiment, stages, cuts)
    if only_list:
        output().print(cut_point_table(config))
    else:
        print_all(output(), split_parts(config, link))
