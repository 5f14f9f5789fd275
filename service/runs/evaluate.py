"""`distill evaluate` and `distill embed`: measure a checkpoint or a probe, or write features, on `scale.num_workers` workers.

Shapes: N images, D features.
"""

import contextlib
import json
import shutil
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from service.cluster.connect import check_ray_address, connect
from service.cluster.resources import Cluster, Reservation, auto_loader_workers, is_local, local_capacity, use_gpu
from service.config.dotted import put
from service.config.experiment import parse_override
from service.config.messages import problems_of, with_sources
from service.config.paths import absolute, with_absolute_file
from service.runs.display import Display, wait_for
from service.runs.driver_log import recording
from service.runs.preflight import check_source, note_equal_splits
from service.runs.run_directory import check_writable
from service.runs.stored.stored_runs import display_name, fetch_result, find_checkpoint, ray_storage, run_store, uri_of
from trainables.config import FEATURES_TAP, EvaluateConfig, Measure
from trainables.data.identity import data_identity
from trainables.errors import CheckpointError, ClusterError, DistillError, ExperimentError, OtherClassesError, StorageError
from trainables.failures import OUT_OF_MEMORY_KINDS, RETRYABLE, WorkersFailedError, first_cause
from trainables.models.checkpoint_header import FILE_SUFFIXES, is_safetensors, read_checkpoint_header
from trainables.models.names import check_model_name, library_of
from trainables.notices import notice
from trainables.object_store.store import OPENING_S, ObjectStore
from trainables.rules import resize_covers_crop
from trainables.rundir import RunDir, StageDir, create_private, replacing, unwritable_reason, write_text
from trainables.user_code import file_of, option_key

CHANGEABLE = ("data", "scale", "precision")
SUFFIXES = (".parquet", ".npy")
"""Files that `distill embed` writes."""


def resolve(
    checkpoint: str,
    data_path: str,
    overrides: list[str],
    model: str | None = None,
    weights_key: str | None = None,
    *,
    measure: Measure = "accuracy",
    tap: str = FEATURES_TAP,
) -> EvaluateConfig:
    """Configure the evaluation of `checkpoint` on images prepared as in its training. `--set` changes data.*, scale.*, precision.

    With a `model`, `checkpoint` is like `teacher.weights`, and images are prepared as the weights' record says, or else by
    `--set` and the defaults of `data`. Probes and features accept weights with any classes or none.

    Raises:
        CheckpointError: the checkpoint does not exist, is damaged, or has other classes than the data.
        DataError: the data cannot be read.
        ExperimentError: an override is invalid.
    """
    data = {"path": absolute(data_path), "global_batch_size": 256}
    tree: dict[str, Any] = {"checkpoint": "unset", "output": "unset", "measure": measure, "tap": tap, "data": data}
    for text in overrides:
        key, value = parse_override(text)
        if key.split(".")[0] not in CHANGEABLE:
            raise ExperimentError(f"--set {text}: an evaluation has the keys data.*, scale.* and precision")
        put(tree, {key: value}, f"--set {text}")
    if "more" in tree["data"]:
        raise ExperimentError("data.more: an evaluation reads one set: leave it out")
    checked(tree)  # a wrong override is refused before the checkpoint is read, which imports torch
    model = model and with_absolute_file(model)
    if model is not None:
        check_model_name(model)
    path = find_checkpoint(checkpoint)
    if path is None and model is None:
        or_model = ", or a model with --weights DEFAULT" if measure == "embed" else ""
        raise CheckpointError(f"no checkpoint at {checkpoint}: give a .safetensors file that `distill train` wrote{or_model}")
    is_ours = path is not None and (is_safetensors(path) or (model is None and path.suffix not in FILE_SUFFIXES))
    header = read_checkpoint_header(path) if path is not None and is_ours else None
    if path is not None and header is not None:
        if model is not None and not check_model_name(model).is_built_as(check_model_name(header.model)):
            raise CheckpointError(f"{path} is a {header.model}, not a {model}: leave out --model")
        if model is None and (file := file_of(header.model)) is not None:
            notice(f"{path} is a {option_key(header.model)} of {file}, which is run now: --model FILE.py:CLASS runs another")
        images, tree["run_store"] = trained_images(path), run_store(path)
    elif model is not None:
        images, tree["weights_key"] = published_images(model, checkpoint if path is None else str(path)), weights_key
    else:
        add = "add --model NAME, as in --model resnet18"
        instead = f"write `distill embed MODEL --weights {path}`" if measure == "embed" else add
        raise CheckpointError(f"{path} does not name its model: {instead}")
    tree |= {"checkpoint": str(path.absolute()) if path else checkpoint, "data": {**images, **tree["data"]}}
    config = checked(tree if model is None else {**tree, "model": model})
    if header is None:
        data = config.data.model_dump(mode="json", include={"image_size", "val_resize", "mean", "std"}, exclude_none=True)
        source = f"as {checkpoint} records" if "mean" in images else "by --set and the defaults, as the weights have no record"
        notice(f"images prepared {source}: " + ", ".join(f"data.{name} {value}" for name, value in data.items()))
    check_classes(config, model or (header.model if header else ""))
    return config


def trained_images(checkpoint: Path) -> dict[str, Any]:
    """How a checkpoint's training prepared its validation images, as keys of `data`."""
    from trainables.engine.checkpoint import read_metadata

    return known(read_metadata(checkpoint))


def published_images(model: str, weights: str) -> dict[str, Any]:
    """Return the keys of `data` that prepare images for published weights; without a record, only the model's default size."""
    from trainables.models.model_input import trained_input

    record = trained_input(model, weights)
    if record is not None:
        return known(record._asdict())
    library, name = library_of(model)
    return known({"image_size": library.default_size(name)})


def known(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: values[name] for name in ("image_size", "val_resize", "mean", "std") if values.get(name)}


def check_classes(config: EvaluateConfig, model: str) -> None:
    """Check that the model loads for the data's classes, or for its features. Raises DistillError: see `resolve`."""
    from trainables.models.weights import load_teacher

    if problem := resize_covers_crop(config.data):
        raise ExperimentError(problem)
    if config.measure != "embed" and not config.data.labels:
        raise ExperimentError("data.labels: false: an accuracy needs labels: leave it out, or run `distill embed`")
    if config.measure != "accuracy":
        from trainables.engine.features import SPLITS, load_tapped

        train, val = (check_source(config.data, split) for split in SPLITS)
        if config.measure != "embed":
            note_equal_splits(config.data, data_identity(train, val))
        load_tapped(config)
        return
    classes = check_source(config.data, "val").classes
    fit: dict[str, Any] = {"image_size": config.data.image_size, "classes": classes, "seed": 0}
    try:
        load_teacher(model, config.checkpoint, **fit, weights_key=config.weights_key)
    except OtherClassesError as error:
        remedy = "give images of its classes, or measure its features with --probe knn"
        raise CheckpointError(f"{error.fact}: {remedy}" if error.fact else str(error)) from error


def checked(tree: dict[str, Any]) -> EvaluateConfig:
    """Validate a configuration. Raises ExperimentError with a line for each mistake."""
    try:
        return EvaluateConfig.model_validate(tree)
    except ValidationError as error:
        raise with_sources(problems_of(error, EvaluateConfig), "--set") from error


def run_evaluation(
    config: EvaluateConfig, checkpoint: str, root: Path, take: Callable[[Path], None] | None = None
) -> dict[str, Any]:
    """Run an evaluation. Returns top-1, top-5, the number of images, reasons for unreadable ones, and the loss or the
    probe's choices. `take` is called with the file of features.

    Raises DistillError.
    """
    check_writable(root, None)
    check_ray_address()
    cpus = reserve(config, local_capacity())[1].total_cpus if is_local() else 0
    run_dir = RunDir(root.absolute() / ".evaluate" / f"{Path(config.checkpoint).stem}-{time.time_ns():x}")
    create_private(root.absolute())
    run_dir.root.mkdir(parents=True)
    output, is_copy = run_dir.root / "result.json", uri_of(run_dir.root) is not None
    try:
        with (
            Display() as display,
            connect(cpus, run_dir.root, is_copy=is_copy) as cluster,
            recording(run_dir.events) as recorder,
        ):
            from trainables.worker import trainer

            workers, reservation = reserve(config, cluster)
            doing = "embedding with" if take else "evaluating"
            display.print(f"{doing} {checkpoint} on {config.data.path} with {config.scale.num_workers} workers")
            display.watch(run_dir.events)
            if config.measure != "accuracy":
                display.follow("images", "images", StageDir(run_dir.root / "images"))
            data = config.data.model_copy(update={"loader_workers": workers})
            job = config.model_copy(update={"data": data, "output": display_name(output)})
            gpu, storage = bool(reservation.gpus), ray_storage(run_dir)
            fit = partial(trainer.fit, job, use_gpu=gpu, loader_workers=workers, storage=storage, name="workers")
            try:
                wait_for(partial(fit, recorder=recorder), display)
            except trainer.ClusterFullError as error:
                raise ClusterError(f"evaluation failed: {error}; wait until they end") from error
            except WorkersFailedError as error:
                raise evaluation_error(error) from error
            fetch_result(output)
            if take:
                fetch_result(output.with_suffix(".parquet"))
                take(output.with_suffix(".parquet"))
            return dict(json.loads(output.read_text()))
    finally:
        if is_copy:
            with contextlib.suppress(StorageError):  # the evaluation's result or error matters more
                for uri in (display_name(run_dir.root), ray_storage(run_dir)):
                    ObjectStore(uri, OPENING_S).delete_all()
        shutil.rmtree(run_dir.root, ignore_errors=True)
        with contextlib.suppress(OSError):  # another evaluation is running
            run_dir.root.parent.rmdir()


def reserve(config: EvaluateConfig, cluster: Cluster) -> tuple[int, Reservation]:
    """Return the loader workers per worker, and the evaluation's reservation. Raises ClusterError: it does not fit."""
    workers, scale = config.data.loader_workers, config.scale
    has_gpu = use_gpu(scale.use_gpu, cluster)
    if workers == "auto":
        workers = auto_loader_workers(cluster, scale.num_workers, scale.cpus_per_worker, use_gpu=has_gpu)
    reservation = Reservation(scale.num_workers, scale.cpus_per_worker + workers, int(has_gpu))
    if refusal := cluster.refusal(reservation):
        raise ClusterError(f"{refusal}: lower scale.num_workers or data.loader_workers")
    return workers, reservation


def evaluation_error(error: WorkersFailedError) -> DistillError:
    cause = first_cause(error.failures)
    if cause.kind in OUT_OF_MEMORY_KINDS:
        return ClusterError(f"evaluation failed: {cause}: lower data.global_batch_size or data.loader_workers")
    if cause.kind in RETRYABLE:
        return ClusterError(f"evaluation failed: {cause}; repeat the command")
    return DistillError(f"evaluation failed: {cause}")


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
