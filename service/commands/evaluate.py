"""`evaluate` and `embed`: the accuracy of a checkpoint, or of a probe of its features, and the features themselves."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from service.commands.options import DATA_PATH, RUNS_OR_URI, SET, FileOrUri, PathType, check_given
from service.runs.evaluate import embed as run_embed
from service.runs.evaluate import resolve, run_evaluation
from trainables.config import FEATURES_TAP, Measure

WEIGHTS_KEY = click.option("--weights-key", help="As teacher.weights_key.")
TAP = click.option("--tap", default=FEATURES_TAP, show_default=True, help="The tap to read as features: see `distill taps`.")


MEASURED = {"loss": "loss {:.5f}", "num_neighbors": "k-NN of {:.0f} neighbors on {tap}", "l2": "linear probe on {tap}, l2 {:g}"}
"""What is printed behind an accuracy of what comes with it."""


@click.command()
@click.argument("checkpoint", type=FileOrUri())
@click.option("--data", "data_path", type=FileOrUri(), required=True, help=DATA_PATH)
@click.option("--model", help="As teacher.model: CHECKPOINT is then as teacher.weights.")
@WEIGHTS_KEY
@click.option("--probe", type=click.Choice(["knn", "linear"]), help="Measure a classifier on its frozen features instead.")
@TAP
@SET
@RUNS_OR_URI
def evaluate(
    checkpoint: str, data_path: str, probe: Measure | None, overrides: tuple[str, ...], root: Path, **options: Any
) -> None:
    """Exact accuracy of a checkpoint, of any teacher's weights, or of a probe of its features.

    On the validation split, distributed. With --probe the model may have other classes than the data, or none.
    """
    check_given("--tap needs --probe", "--weights-key needs --model")
    config = resolve(checkpoint, data_path, list(overrides), measure=probe or "accuracy", **options)
    click.echo("\n".join(formatted(run_evaluation(config, checkpoint, root))))


@click.command()
@click.argument("model", metavar="CHECKPOINT|RUN|MODEL", type=FileOrUri())
@click.option("--data", "data_path", type=FileOrUri(), required=True, help=DATA_PATH)
@click.option("--to", type=PathType(dir_okay=False), required=True, help="FILE.parquet or FILE.npy.")
@click.option("--weights", type=FileOrUri(), help="Weights of MODEL, as teacher.weights.")
@WEIGHTS_KEY
@TAP
@SET
@RUNS_OR_URI
def embed(model: str, data_path: str, to: Path, overrides: tuple[str, ...], root: Path, **options: Any) -> None:
    """A model's features of every image of a data set, in one file.

    Both splits are written. A .parquet file has the columns path, split, label, class and embedding; a .npy file (N, D) of
    float32, its images' paths in FILE.npy.txt.
    """
    check_given("--weights-key needs --weights")
    result = run_embed(model, data_path, to, list(overrides), root, **options)
    line = "{num_images:.0f} images × {num_features:.0f} features, {skipped_images:.0f} unreadable".format_map(result)
    click.echo("\n".join([f"{to}: {line}", *details(result)]))


def formatted(result: Mapping[str, Any]) -> list[str]:
    """The lines that are printed of what `evaluate_checkpoint` or `probe_checkpoint` returns."""
    measured = next(text.format(result[name], tap=result.get("tap")) for name, text in MEASURED.items() if name in result)
    trained = f"{result['num_train_images']:.0f} for training, " if "num_train_images" in result else ""
    counts = f"{result['num_images']:.0f} images, {trained}{result['skipped_images']:.0f} unreadable"
    return [f"Acc@1 {result['top1_pct']:.3f}  Acc@5 {result['top5_pct']:.3f}  {measured}  ({counts})", *details(result)]


def details(result: Mapping[str, Any]) -> list[str]:
    """Which precision `auto` was, and the images that could not be read."""
    precision = [f"precision auto: {result['precision']}: {result['precision_reason']}"] if result["precision_reason"] else []
    return [*precision, *(f"skipped {image}" for image in sorted(result["skipped"]))]
