"""`split`: where a model would be cut for several devices."""

from __future__ import annotations

import click

from service.commands.options import RECIPE, SET, print_all
from service.config.experiment import load
from service.runs.display import output


@click.command()
@RECIPE
@SET
@click.option("--stages", type=click.IntRange(2, 64), default=2, show_default=True, help="Devices that share one student.")
@click.option("--cut", metavar="NAME,NAME", help="Modules with which the later stages begin; default: the fastest cut.")
@click.option("--link", type=click.FloatRange(min=0, min_open=True), metavar="GB/S", help="Speed from one device to the next.")
@click.option("--list", "only_list", is_flag=True, help="All cut points, without timing.")
def split(
    recipe_or_file: str, overrides: tuple[str, ...], stages: int, cut: str | None, link: float | None, only_list: bool
) -> None:
    """Where the student is best cut into pipeline stages, by timing its parts on this machine, and whether that helps.

    \b
    Examples:  distill split cifar100 --stages 2
               distill split cifar100 --list
               distill split cifar100 --cut layer2
    """
    from service.report.split_table import cut_point_table, split_parts

    experiment = load(recipe_or_file, overrides, method_files="ignore").experiment
    if only_list:
        output().print(cut_point_table(experiment))
        return
    cuts = None if cut is None else tuple(name.strip() for name in cut.split(","))
    print_all(output(), split_parts(experiment, stages if cuts is None else len(cuts) + 1, cuts, link))
