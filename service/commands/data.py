"""`pack` and `data`: packed data sets."""

from pathlib import Path
from typing import Any

import click

from service.commands.options import PROCESSES, PathType, check_given, print_all
from service.report.contact_sheet import describe, write_sheet
from service.runs.pack import pack as run_pack
from service.runs.pack import summary_line
from service.runs.pack import verify as run_verify
from trainables.data.index import read_index
from trainables.data.pack.modes import Mode
from trainables.metrics.telemetry import usable_cores
from trainables.rundir import expand_home


@click.command()
@click.argument("source", type=PathType())
@click.argument("dest", type=PathType())
@click.option("--max-side", type=click.IntRange(min=1), help="Shrink larger images to JPEGs of this longer side, in pixels.")
@click.option("--quality", type=click.IntRange(1, 100), default=90, show_default=True, help="JPEG quality for --max-side.")
@click.option("--raw", type=click.IntRange(min=1), help="Store pixels; the shorter side is at most this long.")
@click.option("--check", is_flag=True, help="Decode every image: also finds damage inside a file.")
@click.option("--strict", is_flag=True, help="Unreadable images are an error; otherwise they are left out and listed.")
@click.option("--labels/--no-labels", default=True, help="Whether there are labels; without, any folder of images will do.")
@click.option(
    "--val-share",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    help="Share held out where there is no validation split, by a hash of the names; 0.1 without labels.",
)
@PROCESSES
def pack(
    source: Path,
    dest: Path,
    max_side: int | None,
    quality: int,
    raw: int | None,
    processes: int | None,
    **options: Any,
) -> None:
    """Put a data set into a few large files, for data.path: an image folder or list, LMDB, tars, TFRecords, Parquet, CIFAR.

    If it is killed, repeat the command to continue. With RAY_ADDRESS set it spreads over the cluster.
    """
    check_given("--max-side excludes --raw", "--quality needs --max-side")
    try:
        packing = run_pack(source, dest, Mode(max_side, quality, raw), processes=processes or usable_cores(), **options)
    except KeyboardInterrupt:
        click.echo("interrupted; repeat the command to continue", err=True)
        raise
    click.echo(summary_line(dest, packing))


@click.command()
@click.argument("directory", type=PathType())
@click.option("--verify", is_flag=True, help="Read everything and compare every checksum.")
@click.option("--sheet", type=PathType(dir_okay=False), help="Write a PNG of pictures here.")
@PROCESSES
def data(directory: Path, verify: bool, sheet: Path | None, processes: int | None) -> None:
    """The content of a packed set: counts, classes, sizes, shapes, pictures."""
    check_given("--processes needs --verify")
    directory = expand_home(directory).resolve()
    index = read_index(directory)
    print_all(describe(directory, index))
    if sheet:
        click.echo(f"{write_sheet(directory, sheet)} pictures: {sheet}")
    if verify:
        run_verify(directory, index, processes or usable_cores())
        click.echo(f"every checksum of {len(index.files())} files is right")
