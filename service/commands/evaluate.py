"""`evaluate` and `embed`: the accuracy of a checkpoint, or of a probe of its features, and the features themselves."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from service.commands.options import DATA_PATH, RUNS_OR_URI, SET, is_given
from service.commands.path_types import DataPath, FileOrUri, MethodName, PathType
from service.runs.embed import embed as run_embed
from service.runs.evaluate import resolve, run_evaluation
from trainables.config import FEATURES_TAP, Measure

WEIGHTS_KEY = click.option("--weights-key", help="As teacher.weights_key.")
TAP = click.option("--tap", default=FEATURES_TAP, show_default=True, help="The tap to read as features: see `distill taps`.")


MEASURED = {"loss": "loss {:.5f}", "num_neighbors": "k-NN of {:.0f} neighbors on {tap}", "l2": "linear probe on {tap}, l2 {:g}"}
"""What is printed behind an accuracy of what comes with it."""


@click.command()
@click.argument("checkpoint", type=FileOrUri())
@click.option("--data", "data_path", type=DataPath(), required=True, help=DATA_PATH)
@click.option(
    "--model",
    type=MethodName(),
    help="As teacher.model, for weights that do not name it: CHECKPOINT is then as teacher.weights.",
)
@WEIGHTS_KEY
@click.option(
    "--probe",
    type=click.Choice(["knn", "linear"]),
    help="Not the model's own classes, but a classifier on its frozen features of the training images.",
)
@TAP
@SET
@RUNS_OR_URI
def evaluate(
    checkpoint: str,
    data_path: str,
    model: str | None,
    weights_key: str | None,
    probe: Measure | None,
    tap: str,
    overrides: tuple[str, ...],
    root: Path,
) -> None:
    """Exact accuracy of a checkpoint, of any teacher's weights, or of a probe of its features.

    On the validation split, distributed. With --probe the model may have other classes than the data, or none.
    """
    if probe is None and is_given("tap"):
        raise click.UsageError("--tap is for the features that --probe reads: add --probe, or leave it out")
    measure: Measure = probe or "accuracy"
    config = resolve(checkpoint, data_path, list(overrides), model, weights_key, measure=measure, tap=tap)
    result = run_evaluation(config, checkpoint, root)
    click.echo("\n".join(formatted(result)))


@click.command()
@click.argument("model", metavar="CHECKPOINT|RUN|MODEL", type=FileOrUri())
@click.option("--data", "data_path", type=DataPath(), required=True, help=DATA_PATH)
@click.option("--to", type=PathType(path_type=Path, dir_okay=False), required=True, help="FILE.parquet or FILE.npy.")
@click.option(
    "--weights", type=FileOrUri(), help="Weights of MODEL, as teacher.weights: DEFAULT, another published name, a file."
)
@WEIGHTS_KEY
@TAP
@SET
@RUNS_OR_URI
def embed(
    model: str,
    data_path: str,
    to: Path,
    weights: str | None,
    weights_key: str | None,
    tap: str,
    overrides: tuple[str, ...],
    root: Path,
) -> None:
    """A model's features of every image of a data set, in one file.

    Both splits are written. A .parquet file has the columns path, split, label, class and embedding; a .npy file (N, D) of
    float32, its images' paths in FILE.npy.txt.
    """
    if weights_key is not None and weights is None:
        raise click.UsageError("--weights-key is for --weights: add --weights, or leave it out")
    result = run_embed(model, data_path, to, list(overrides), root, weights=weights, weights_key=weights_key, tap=tap)
    sizes = (
        f"{result['num_images']:.0f} images × {result['num_features']:.0f} features, {result['skipped_images']:.0f} unreadable"
    )
    click.echo("\n".join([f"{to}: {sizes}", *details(result)]))


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
