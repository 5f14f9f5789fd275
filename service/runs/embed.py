"""`distill embed`: write a model's features of every image of a data set to one file. Shapes: N images, D features."""

import shutil
from pathlib import Path
from typing import Any

from service.runs.evaluate import resolve, run_evaluation
from trainables.config import FEATURES_TAP
from trainables.errors import ExperimentError
from trainables.rundir import replacing, unwritable_reason, write_text

SUFFIXES = (".parquet", ".npy")


def embed(
    model: str,
    data_path: str,
    to: Path,
    overrides: list[str],
    root: Path,
    *,
    weights: str | None = None,
    weights_key: str | None = None,
    tap: str = FEATURES_TAP,
) -> dict[str, Any]:
    """Write the features to `to`. Returns what `trainables.engine.features.embed_checkpoint` returns.

    `model` is a checkpoint, or with `weights` the name of a model.

    Raises DistillError.
    """
    if to.suffix not in SUFFIXES:
        raise ExperimentError(f"--to {to}: write FILE.parquet or FILE.npy")
    if reason := unwritable_reason(to.parent):
        raise ExperimentError(f"--to {to} cannot be written: {reason}")
    checkpoint, name = (model, None) if weights is None else (weights, model)
    config = resolve(checkpoint, data_path, overrides, name, weights_key, measure="embed", tap=tap)

    def take(features: Path) -> None:
        if to.suffix == ".npy":
            write_npy(features, to)
        else:
            with replacing(to) as temporary:
                shutil.copyfile(features, temporary)

    return run_evaluation(config, model, root, take)


def write_npy(features: Path, to: Path) -> None:
    """Convert the embeddings of a Parquet file to an (N, D) float32 array, and write the image paths to FILE.npy.txt."""
    import numpy as np
    import pyarrow.parquet as pq

    with pq.ParquetFile(features) as file:
        width = file.schema_arrow.field("embedding").type.list_size
        write_text(to.with_name(f"{to.name}.txt"), "".join(f"{path}\n" for path in file.read(["path"])["path"].to_pylist()))
        with replacing(to) as temporary:
            shape = (file.metadata.num_rows, width)
            values_ND = np.lib.format.open_memmap(temporary, mode="w+", dtype=np.float32, shape=shape)
            begin = 0
            for batch in file.iter_batches(columns=["embedding"]):
                rows_BD = batch["embedding"].flatten().to_numpy().reshape(-1, width)
                values_ND[begin : begin + len(rows_BD)] = rows_BD
                begin += len(rows_BD)
            values_ND.flush()
