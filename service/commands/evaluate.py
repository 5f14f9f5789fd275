"""`evaluate`: the accuracy of a checkpoint."""

from pathlib import Path

import click

from service.commands.options import DATA_PATH, RUNS_OR_URI, SET
from service.commands.path_types import DataPath, FileOrUri
from service.runs.evaluate import evaluate as run_evaluate


@click.command()
@click.argument("checkpoint", type=FileOrUri())
@click.option("--data", "data_path", type=DataPath(), required=True, help=DATA_PATH)
@SET
@RUNS_OR_URI
def evaluate(checkpoint: str, data_path: str, overrides: tuple[str, ...], root: Path) -> None:
    """Exact accuracy of a checkpoint on a validation split, distributed."""
    result = run_evaluate(checkpoint, data_path, list(overrides), root)
    click.echo(
        f"Acc@1 {result['top1_pct']:.3f}  Acc@5 {result['top5_pct']:.3f}  loss {result['loss']:.5f}  "
        f"({result['num_images']:.0f} images, {result['skipped_images']:.0f} unreadable)"
    )
    for image in sorted(result["skipped"]):
        click.echo(f"skipped {image}")
