"""`evaluate`: the accuracy of a checkpoint."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from service.commands.options import DATA_PATH, RUNS_OR_URI, SET
from service.commands.path_types import DataPath, FileOrUri
from service.runs.evaluate import evaluate as run_evaluate


@click.command()
@click.argument("checkpoint", type=FileOrUri())
@click.option("--data", "data_path", type=DataPath(), required=True, help=DATA_PATH)
@click.option("--model", help="As teacher.model, for weights that do not name it: CHECKPOINT is then as teacher.weights.")
@click.option("--weights-key", help="As teacher.weights_key.")
@SET
@RUNS_OR_URI
def evaluate(
    checkpoint: str, data_path: str, model: str | None, weights_key: str | None, overrides: tuple[str, ...], root: Path
) -> None:
    """Exact accuracy of a checkpoint, or of any teacher's weights, on a validation split, distributed."""
    result = run_evaluate(checkpoint, data_path, list(overrides), root, model=model, weights_key=weights_key)
    click.echo("\n".join(formatted(result)))


def formatted(result: Mapping[str, Any]) -> list[str]:
    """The lines that are printed of what `evaluate_checkpoint` returns."""
    accuracy = (
        f"Acc@1 {result['top1_pct']:.3f}  Acc@5 {result['top5_pct']:.3f}  loss {result['loss']:.5f}  "
        f"({result['num_images']:.0f} images, {result['skipped_images']:.0f} unreadable)"
    )
    precision = [f"precision auto: {result['precision']}: {result['precision_reason']}"] if result["precision_reason"] else []
    return [accuracy, *precision, *(f"skipped {image}" for image in sorted(result["skipped"]))]
