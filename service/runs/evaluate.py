"""`distill evaluate` and `embed`: accuracy of a checkpoint or of a probe, or features, on `scale.num_workers` workers."""

import contextlib
import json
import shutil
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from service.cluster.connect import check_ray_address, connect
from service.cluster.resources import Cluster, Reservation, auto_loader_workers, is_local, local_capacity, use_gpu
from service.config.dotted import put
from service.config.experiment import parse_override
from service.config.messages import problems_of
from service.config.paths import absolute, absolute_model
from service.runs.display import Display, wait_for
from service.runs.driver_log import recording
from service.runs.preflight import check_source, note_equal_splits
from service.runs.run_directory import check_writable
from service.runs.stored.stored_runs import delete, display_name, fetch_checkpoint, fetch_result, ray_storage, run_store, uri_of
from trainables.config import FEATURES_TAP, EvaluateConfig, Measure
from trainables.data.identity import data_identity
from trainables.errors import (
    CheckpointError,
    ClusterError,
    DistillError,
    ExperimentError,
    OtherClassesError,
    StorageError,
)
from trainables.failures import OUT_OF_MEMORY_KINDS, RETRYABLE, WorkersFailedError, first_cause
from trainables.models.checkpoint_header import FILE_SUFFIXES, is_safetensors, locate_checkpoint, read_checkpoint_header
from trainables.models.names import check_model_name, library_of
from trainables.notices import notice
from trainables.object_store.store import OPENING_S, ObjectStore, is_uri
from trainables.rules import resize_covers_crop
from trainables.rundir import RunDir, StageDir, create_private
from trainables.user_code import file_of, option_key

CHANGEABLE = ("data", "scale", "precision")


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
    """The evaluation of `checkpoint` as it was trained, on other data; `--set` changes data.*, scale.* and precision.

    With a `model`, `checkpoint` is as `teacher.weights`. A probe and features take weights of any classes, or of none.

    Raises:
        CheckpointError: no such checkpoint, a damaged one, or one of other classes than the data's.
        DataError: the data cannot be read.
        ExperimentError: an override that does not fit.
    """
    tree: dict[str, Any] = {
        "checkpoint": "unset",
        "output": "unset",
        "measure": measure,
        "tap": tap,
        "data": {"path": absolute(data_path), "global_batch_size": 256},
    }
    for text in overrides:
        key, value = parse_override(text)
        if key.split(".")[0] not in CHANGEABLE:
            raise ExperimentError(f"--set {text}: an evaluation has the keys data.*, scale.* and precision")
        put(tree, key, value, f"--set {text}")
    if "more" in tree["data"]:
        raise ExperimentError("data.more: an evaluation reads one set: leave it out")
    checked(tree)  # a wrong override is refused before the checkpoint is read, which imports torch
    if weights_key is not None and model is None:
        raise ExperimentError("--weights-key chooses a part of weights that do not name their model: add --model NAME")
    if model is not None:
        return with_published_images(model, checkpoint, weights_key, tree)
    path = fetch_checkpoint(checkpoint) if is_uri(checkpoint) else locate_checkpoint(checkpoint) or Path(checkpoint)
    embeds = measure == "embed"
    if not path.is_file():
        or_model = ", or a model with --weights DEFAULT" if embeds else ""
        raise CheckpointError(f"no checkpoint at {path}: give a .safetensors file that `distill train` wrote{or_model}")
    if path.suffix in FILE_SUFFIXES[1:] or read_checkpoint_header(path) is None:
        instead = f"write `distill embed MODEL --weights {path}`" if embeds else "add --model NAME, as in --model resnet18"
        raise CheckpointError(f"{path} does not name its model: {instead}")
    return with_trained_images(path, tree)


def with_published_images(model: str, weights: str, weights_key: str | None, tree: dict[str, Any]) -> EvaluateConfig:
    """The evaluation of a model's weights, on images as their record says, or else as `--set` and the defaults of `data` do.

    Raises DistillError: the weights cannot be read, or do not fit the model or the data.
    """
    model = absolute_model(model)
    found = check_model_name(model)
    path = fetch_checkpoint(weights) if is_uri(weights) else locate_checkpoint(weights)
    header = read_checkpoint_header(path) if path is not None and is_safetensors(path) else None
    if path is not None and header is not None:
        if not found.is_built_as(check_model_name(header.model)):
            raise CheckpointError(f"{path} is a {header.model}, not a {model}: leave out --model")
        return with_trained_images(path, {**tree, "model": model})
    from trainables.models.trained_input import trained_input

    record = trained_input(model, weights if path is None else str(path))
    values = {name: getattr(record, name) for name in ("image_size", "val_resize", "mean", "std")} if record else {}
    recorded = {name: value for name, value in values.items() if value}
    library, name_there = library_of(model)
    if not record and (size := library.default_size(name_there)):
        tree = {**tree, "data": {"image_size": size, **tree["data"]}}
    tree = {**tree, "checkpoint": str(path.absolute()) if path else weights, "model": model, "weights_key": weights_key}
    tree["data"] = {**recorded, **tree["data"]}
    config = checked(tree)
    defaults = "prepared by --set and the defaults, as the weights have no record"
    source = f"prepared as {weights} records" if "mean" in recorded else defaults
    data = config.data
    resize = f"val_resize {data.val_resize}, " if data.val_resize else ""
    notice(f"images {source}: data.image_size {data.image_size}, {resize}mean {list(data.mean)}, std {list(data.std)}")
    return with_fitting_classes(config, model, weights_key)


def with_trained_images(checkpoint: Path, tree: dict[str, Any]) -> EvaluateConfig:
    """The evaluation with the image size and normalization that the checkpoint was trained with; see `resolve`.

    Raises CheckpointError: its model does not fit the data.
    """
    from trainables.engine.checkpoint import read_about

    about = read_about(checkpoint)
    trained = {name: about[name] for name in ("image_size", "val_resize", "mean", "std") if about.get(name) is not None}
    tree = {**tree, "checkpoint": str(checkpoint.absolute()), "data": {**trained, **tree["data"]}}
    tree["run_store"] = run_store(checkpoint)
    if "model" not in tree and (file := file_of(about["model"])) is not None:
        notice(f"{checkpoint} is a {option_key(about['model'])} of {file}, which is run now: --model FILE.py:CLASS runs another")
    return with_fitting_classes(checked(tree), tree.get("model", about["model"]))


def with_fitting_classes(config: EvaluateConfig, model: str, weights_key: str | None = None) -> EvaluateConfig:
    """The evaluation, whose model was loaded for the classes of its data, or for its features.

    Raises DistillError: see `resolve`.
    """
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
        return config
    classes = check_source(config.data, "val").classes
    fit: dict[str, Any] = {"image_size": config.data.image_size, "classes": classes, "seed": 0}
    try:
        load_teacher(model, config.checkpoint, **fit, weights_key=weights_key)
    except OtherClassesError as error:
        raise CheckpointError(f"{error}, or measure its features with --probe knn") from error
    return config


def checked(tree: dict[str, Any]) -> EvaluateConfig:
    """Raises ExperimentError with a line for each mistake."""
    try:
        return EvaluateConfig.model_validate(tree)
    except ValidationError as error:
        raise ExperimentError(problems_of(error, EvaluateConfig).text("--set")) from error


def evaluate(
    checkpoint: str,
    data_path: str,
    overrides: list[str],
    root: Path,
    *,
    model: str | None = None,
    weights_key: str | None = None,
    measure: Measure = "accuracy",
    tap: str = FEATURES_TAP,
) -> dict[str, Any]:
    """Top-1, top-5, the number of images, and the names of the unreadable ones, each with its reason; the loss, or what the
    probe has chosen.

    Raises DistillError.
    """
    check_writable(root, None)
    return carry_out(resolve(checkpoint, data_path, overrides, model, weights_key, measure=measure, tap=tap), checkpoint, root)


def carry_out(config: EvaluateConfig, checkpoint: str, root: Path, take: Callable[[Path], None] | None = None) -> dict[str, Any]:
    """What the workers of an evaluation return. `take` is called with the file of features, which is then removed.

    Raises DistillError.
    """
    check_ray_address()
    cpus = reserve(config, local_capacity())[1].total_cpus if is_local() else 0
    storage = RunDir(root.absolute() / ".evaluate")
    create_private(storage.root.parent)
    storage.root.mkdir(exist_ok=True)
    is_copy = uri_of(storage.root) is not None
    output = storage.root / f"{Path(config.checkpoint).stem}-{time.time_ns():x}.json"
    log = RunDir(output.with_suffix("")).events
    with Display() as display, connect(cpus, storage.root, is_copy=is_copy) as cluster, recording(log) as recorder:
        from trainables.worker import trainer

        workers, reservation = reserve(config, cluster)
        doing = "embedding with" if take else "evaluating"
        display.print(f"{doing} {checkpoint} on {config.data.path} with {config.scale.num_workers} workers")
        display.watch(log)
        if config.measure != "accuracy":
            display.follow("images", "images", StageDir(output.with_suffix("")))
        data = config.data.model_copy(update={"loader_workers": workers})
        job = config.model_copy(update={"data": data, "output": display_name(output)})
        gpu, name = bool(reservation.gpus), output.stem
        fit = partial(trainer.fit, job, use_gpu=gpu, loader_workers=workers, storage=ray_storage(storage), name=name)
        try:
            wait_for(partial(fit, recorder=recorder), display)
            fetch_result(output)
            result = dict(json.loads(output.read_text()))
            delete(output)
            if take:
                features = output.with_suffix(".parquet")
                try:
                    fetch_result(features)
                    take(features)
                finally:
                    delete(features)
            return result
        except trainer.ClusterFullError as error:
            raise ClusterError(f"evaluation failed: {error}; wait for their end") from error
        except WorkersFailedError as error:
            raise evaluation_error(error) from error
        finally:
            if is_copy:  # Ray's own files, which no cleaning would remove
                with contextlib.suppress(StorageError):  # they are small, and how the evaluation ended matters more
                    ObjectStore(f"{ray_storage(storage)}/{name}", OPENING_S).delete_all()
            for folder in (storage.tune / name, output.with_suffix("")):
                shutil.rmtree(folder, ignore_errors=True)
            for folder in (storage.tune, storage.root):
                with contextlib.suppress(OSError):  # another evaluation is under way
                    folder.rmdir()


def reserve(config: EvaluateConfig, cluster: Cluster) -> tuple[int, Reservation]:
    """The loader workers of each worker, and what the evaluation reserves. Raises ClusterError where that does not fit."""
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
