"""`distill evaluate --probe` and `distill embed`: the features of a frozen model on a data set.

Shapes: B batch, N images, D features.
"""

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from torch import Tensor, float32, float64, nn

from trainables.config import DataConfig, EvaluateConfig
from trainables.data.interface import Source
from trainables.data.loader.loader import Loader
from trainables.data.order import Split
from trainables.data.source import open_on_node
from trainables.device.device_batches import DeviceBatch
from trainables.device.precision import with_precision
from trainables.device.tensor_format import autocast, to_pixels
from trainables.distributed.group import Group, gather_objects
from trainables.engine import checkpoint
from trainables.errors import DataError, ModelError
from trainables.metrics.heartbeat import Heartbeat
from trainables.metrics.report import Report
from trainables.models.model_input import student_input
from trainables.models.pixels import take_pixels
from trainables.models.taps import Taps
from trainables.models.weights import load_teacher
from trainables.object_store.store import is_uri, object_at
from trainables.probes.features import Features, gather_features
from trainables.probes.knn import knn
from trainables.probes.linear import linear_probe
from trainables.rundir import replacing

SPLITS: tuple[Split, ...] = ("train", "val")
PROBES: dict[str, Callable[..., dict[str, float]]] = {"knn": knn, "linear": linear_probe}
_MAX_ROW_GROUP = 2**24
"""Maximum number of values in a row group of a Parquet file: 64 MiB."""


def probe_checkpoint(config: EvaluateConfig, group: Group, heartbeat: Heartbeat, report: Report) -> dict[str, Any]:
    """Evaluate the probe `config.measure` on features of the validation images; see `evaluate_checkpoint`.

    `report` is called for each split and batch, with the number of images as the step.

    Raises DistillError: the weights or the data cannot be read, or the model has no such tap.
    """
    config = with_precision(config, group)
    embed, skipped, found = embedder(config, group, report), list[str](), list[Features]()
    heartbeat.enter("eval")
    for split in SPLITS:
        with split_loader(config, split, group, report) as loader:
            found.append(gather_features(embed, loader, group, heartbeat))
            skipped += all_skipped(loader, group)
        if not len(found[-1].labels_N):
            raise DataError(f"{config.data.path}: no image of the split {split} could be read")
    train, val = found
    return {
        **PROBES[config.measure](train, val, group, beat=heartbeat.beat),
        "num_train_images": float(len(train.labels_N)),
        **_summary(config, val, skipped),
    }


def embed_checkpoint(config: EvaluateConfig, group: Group, heartbeat: Heartbeat, report: Report) -> dict[str, Any]:
    """Write the features of every image of both splits to `config.features_file`; see `probe_checkpoint`.

    Its columns are `path` (the image's name), `split`, `label` and `class` (null if unlabeled), and `embedding` (D × float32).
    """
    config = with_precision(config, group)
    embed, skipped, num_images, num_features = embedder(config, group, report), list[str](), 0, 0
    heartbeat.enter("eval")
    with contextlib.ExitStack() as stack:
        file = stack.enter_context(written_to(config.features_file)) if group.is_main else None
        writer: pq.ParquetWriter | None = None
        for split in SPLITS:
            with split_loader(config, split, group, report) as loader:
                features = gather_features(embed, loader, group, heartbeat, main_only=True)
                skipped += all_skipped(loader, group)
                for table in tables(features, split, loader.source):
                    writer = writer or stack.enter_context(pq.ParquetWriter(file, table.schema))
                    writer.write_table(table)
                    heartbeat.beat()
            num_images += len(features.labels_N)
            num_features = features.features_ND.shape[1] or num_features
        heartbeat.enter("checkpoint")  # a large file takes long to upload
        if group.is_main and not num_images:
            raise DataError(f"{config.data.path}: no image could be read")
    return {**_summary(config, features, skipped), "num_images": float(num_images), "num_features": float(num_features)}


def _summary(config: EvaluateConfig, val: Features, skipped: list[str]) -> dict[str, Any]:
    return {"tap": config.tap, "num_images": float(len(val.labels_N)), **result_details(config, skipped)}


def result_details(config: EvaluateConfig, skipped: list[str]) -> dict[str, Any]:
    """Return what every evaluation result contains besides its numbers."""
    return {
        "skipped_images": float(len(skipped)),
        "skipped": skipped,
        "precision": config.precision,
        "precision_reason": config.precision_reason,
    }


def load_evaluated(config: EvaluateConfig, classes: Sequence[str], *, logits: bool) -> tuple[str, nn.Module]:
    """Return the name of the evaluated model, and the model on the CPU; see `load_teacher`."""
    name, size = config.model or checkpoint.read_metadata(Path(config.checkpoint))["model"], config.data.image_size
    fit: dict[str, Any] = {"image_size": size, "classes": classes, "seed": 0, "weights_key": config.weights_key}
    return name, load_teacher(name, config.checkpoint, **fit, logits=logits)


def load_tapped(config: EvaluateConfig) -> tuple[nn.Module, Taps]:
    """Load a checkpoint's model without its classifier, on the CPU, and the tap `config.tap`.

    Raises:
        CheckpointError, ModelError: see `load_teacher`; the model has no such tap, or the tap is not a vector per image.
    """
    name, model = load_evaluated(config, (), logits=False)
    taps = Taps(model, [config.tap], name=name, image_size=config.data.image_size)
    if [len(shape) for shape in taps.shapes] != [1]:
        shapes = " and ".join(str(shape) for shape in taps.shapes)
        raise ModelError(f"model {name}: the tap {config.tap} has the shape {shapes} per image, but must be a vector: use pooled")
    return model, taps


def embedder(config: EvaluateConfig, group: Group, report: Report) -> Callable[[DeviceBatch], Tensor]:
    """Return a function from a batch of uint8 images to a checkpoint's tapped features (B, D). Raises: see `load_tapped`."""
    model, taps = load_tapped(config)
    dtype = float64 if config.precision == "fp64" else float32
    model.to(group.device, dtype)
    take_pixels(model, student_input(config.data))
    precision = autocast(config.precision, group.device)

    def embed(batch: DeviceBatch) -> Tensor:
        with precision(), taps.capture():
            model(to_pixels(batch.images_BCHW, dtype))
            (features_BD,) = taps.pop()
        report("step", batch.position, 0.0, {})
        return features_BD

    return embed


def val_loader(data: DataConfig, split: Split, group: Group) -> Loader:
    """Open a split with validation preprocessing, in stored order and not augmented. Raises DataError: see `Loader`."""
    data = data.model_copy(update={"shuffle": "none"})
    assert isinstance(data.loader_workers, int)
    return Loader(
        open_on_node(data, split),
        data,
        split="val",
        seed=0,
        rank=group.rank,
        world_size=group.world_size,
        loader_workers=data.loader_workers,
        device=group.device,
    )


@contextlib.contextmanager
def split_loader(
    config: EvaluateConfig, split: Split, group: Group, report: Report = lambda kind, step, epoch, metrics: None
) -> Iterator[Loader]:
    """A context with a `val_loader`, which is closed at the end."""
    with contextlib.closing(val_loader(config.data, split, group)) as loader:
        report("start", 0, 0.0, {"max_steps": float(len(loader.source))})
        yield loader


def all_skipped(loader: Loader, group: Group) -> list[str]:
    """List the images of an epoch that could not be read, and why. Raises DataError: more than `data.max_bad` allows."""
    skipped = gather_skipped(loader, group)
    loader.refuse_too_many(skipped)
    return list(skipped.values())


def gather_skipped(loader: Loader, group: Group) -> dict[int, str]:
    """Collect the unreadable images of all ranks: index → name and reason. Every rank must call this."""
    return {index: image for part in gather_objects(loader.skipped, group) for index, image in part.items()}


def tables(features: Features, split: Split, source: Source) -> Iterator[pa.Table]:
    """Convert features into tables with the columns of `embed_checkpoint`."""
    num_images, num_features = features.features_ND.shape
    size = max(1, _MAX_ROW_GROUP // max(1, num_features))
    for rows in (slice(begin, begin + size) for begin in range(0, num_images, size)):
        labels = [label if label >= 0 else None for label in features.labels_N[rows].tolist()]
        values = pa.array(features.features_ND[rows].numpy().astype(np.float32, copy=False).ravel())
        yield pa.table(
            {
                "path": [source.name(index) for index in features.indices_N[rows].tolist()],
                "split": [split] * len(labels),
                "label": pa.array(labels, pa.int64()),
                "class": pa.array([None if label is None else source.classes[label] for label in labels], pa.string()),
                "embedding": pa.FixedSizeListArray.from_arrays(values, num_features),
            }
        )


@contextlib.contextmanager
def written_to(path: str) -> Iterator[Path]:
    """A context with a local path to write to; it ends up at `path`, which may be in an object store."""
    if not is_uri(path):
        with replacing(Path(path)) as temporary:
            yield temporary
        return
    store, name = object_at(path)
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder, name)
        store.put(name, Path(folder, name))
