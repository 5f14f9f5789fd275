"""What can be refused before Ray starts: data, folders, weights, and whether they fit together.

That takes seconds instead of a worker's start. Names, values and their combinations are refused earlier, when the experiment is
read. The cheapest check comes first; only the last ones import torch.
"""

from collections.abc import Collection
from typing import Any, Literal

from service.cluster.connect import check_ray_address
from service.cluster.resources import is_local, local_capacity
from service.config.experiment import Resolved, read_resolved
from service.config.rules import method_names
from service.config.schema import Experiment
from service.runs.dry_run import check_fits, check_parts
from service.runs.plan import Plan
from service.runs.result import Kind, RunResult
from service.runs.run_directory import stages_with
from service.tracking.tracker import check_store
from trainables.config import DataConfig, DataIdentity
from trainables.data.decode import UnreadableImageError, decode_image
from trainables.data.identity import check_same_data, data_identity
from trainables.data.interface import Source
from trainables.data.source import check_placement, open_source, refuse_single_class
from trainables.errors import CheckpointError, DataError, ExperimentError
from trainables.methods.registry import load_method
from trainables.models.checkpoint_header import read_checkpoint_header
from trainables.notices import notice
from trainables.object_store.store import is_uri
from trainables.rules import enough_images
from trainables.rundir import RunDir, unwritable_reason

PROBED_IMAGES = 8


def check_train(resolved: Resolved) -> DataIdentity:
    """Refuse a run that its workers would refuse later. Returns what its data is. Raises DistillError."""
    experiment = resolved.experiment
    check_services(experiment, "train")
    if is_local():  # a cluster's size is known once we are connected
        capacity = local_capacity()
        Plan.on(experiment, capacity).check(capacity)
    data = check_data(experiment)
    check_fits(experiment, len(data.classes), ["student"])
    return data


def check_services(experiment: Experiment, kind: Kind) -> None:
    """Refuse a Ray that does not answer, an MLflow store or server and a `teacher.cache` that cannot be written.

    Raises:
        ClusterError: Ray does not answer.
        ExperimentError: the store or the cache cannot be written, or the server will never take records.
    """
    check_ray_address()
    if experiment.tracking.enabled and experiment.tracking.uri:
        check_store(experiment.tracking.uri, experiment.tracking.experiment)
    check_cache(experiment, kind)


def check_data(experiment: Experiment, searched: Collection[str] = (), *, trains_base: bool = True) -> DataIdentity:
    """Refuse data that cannot be read, and models that do not fit it. Returns what it is.

    `searched`: the keys of a sweep, whose values are not the experiment's; `trains_base`: its own batch size is trained with.

    Raises DistillError.
    """
    if not {"data.stage", "data.cache"} & set(searched):
        for each in experiment.data.sets:
            check_placement(each)
    train, val = (check_source(experiment.data, split) for split in ("train", "val"))
    data = data_identity(train, val)
    note_equal_splits(experiment.data, data)
    if len(val) > len(train):
        notice(f"data.path: {experiment.data.path} has {len(train)} training and {len(val)} validation images: are they swapped?")
    if trains_base and (problem := enough_images(experiment.data, len(train.sets[0]))):
        raise DataError(problem)
    if "data.image_size" not in searched:
        check_models(experiment, val.classes)
        cut = experiment.scale.pipeline_stages > 1 and experiment.teacher is not None and experiment.teacher.weights is None
        check_fits(experiment, len(val.classes), [name for name in experiment.preparation if cut or name != "teacher"])
        check_parts(experiment, len(train.sets[0]), len(val.classes), trained_stages(experiment, searched))
    return data


def note_equal_splits(data: DataConfig, identity: DataIdentity) -> None:
    """Say where an accuracy would be one on the training images."""
    train, val = identity.train, identity.val
    if (train.labels, train.contents) == (val.labels, val.contents):
        notice(f"data.path: {data.path}: the validation images are the training images: accuracy on them says little")


def trained_stages(experiment: Experiment, searched: Collection[str]) -> list[str]:
    """The stages that train with the experiment's own batches, see `check_data`."""
    weights = experiment.teacher.weights if experiment.teacher is not None else None
    before = [name for name in experiment.preparation if name != "teacher" or weights is None]
    return [*(before if experiment.train.max_steps is None else []), *([] if searched else ["student"])]


def check_cache(experiment: Experiment, kind: Kind) -> None:
    """Refuse a `teacher.cache` that will have to be written and cannot be: its teacher would be trained for nothing.

    One that is full already may be read-only; a teacher that is still to be trained cannot have filled it.

    Raises ExperimentError.
    """
    cache = experiment.written_cache(kind)
    if cache is None:
        return
    trained = experiment.teacher is not None and experiment.teacher.weights is not None and not experiment.assistants
    if (reason := unwritable_reason(cache)) and not (trained and cache.is_dir()):
        raise ExperimentError(f"teacher.cache: {cache} cannot be written: {reason}; name another folder")


def check_source(data: DataConfig, split: Literal["train", "val"]) -> Source:
    """Open a split and look at a few of its images, spread over it; of a set behind a URI at the index alone.

    Raises DataError: it is missing or empty, has one class only, or none of those images can be read.
    """
    # The nodes' folders are not this machine's.
    source = open_source(data.model_copy(update={"stage": "none"}), split)
    refuse_single_class(source.classes, f"data.path: {data.path}")
    for each, opened in zip(data.sets, source.sets, strict=False):
        if not is_uri(each.path):  # an image would cost the whole shard that it lies in
            _check_images(each.path, opened)
    return source


def _check_images(path: str, source: Source) -> None:
    reasons = []
    for index in range(0, len(source), -(-len(source) // PROBED_IMAGES)):
        try:
            decode_image(source.read(index))
            return
        except UnreadableImageError as error:
            reasons.append(f"{source.name(index)} ({error})")
    raise DataError(
        f"data.path: {path}: none of {len(reasons)} sampled images can be decoded, such as {reasons[0]}; give whole images"
    )


def check_models(experiment: Experiment, classes: tuple[str, ...]) -> None:
    """Build the teachers for these classes, or load their weights. Imports torch.

    Raises:
        ModelError: a model does not take these images or classes, or its published weights do not.
        CheckpointError: a file of weights cannot be read, or is of another model or other classes.
    """
    from trainables.methods.select import select_methods
    from trainables.models.model_input import input_warnings, teacher_input
    from trainables.models.registry import build_model
    from trainables.models.weights import begin_with, load_teacher

    teacher, distill, student = experiment.teacher, experiment.distill, experiment.student
    size, seed = experiment.data.image_size, experiment.seed
    if student.weights is not None:
        model = build_model(student.model, num_classes=len(classes), image_size=size, seed=seed)
        start: dict[str, Any] = {"image_size": size, "classes": classes, "seed": seed, "weights_key": student.weights_key}
        begin_with(model, student.model, student.weights, **start)
    if teacher is not None and teacher.weights is None:
        build_model(teacher.model, num_classes=len(classes), image_size=size, seed=seed)
    if teacher is not None and (methods := select_methods(distill)):
        fit: dict[str, Any] = {
            "classes": classes,
            "seed": seed,
            "logits": any(m.requires.teacher and m.reads_classes for m in methods),
        }
        for each in teacher.with_others:
            if each.weights is not None:
                if experiment.data.path != "synthetic":
                    for line in input_warnings(each, experiment.data):
                        notice(line)
                own_size = teacher_input(each, experiment.data).image_size
                load_teacher(each.model, each.weights, **fit, image_size=own_size, weights_key=each.weights_key)


def check_data_of_run(
    run: str, experiment: Experiment, result: RunResult, data: DataIdentity | None, *, accept_new: bool
) -> None:
    """Refuse to resume a run on other data than it was trained on, unless that is accepted and possible.

    `data`: None where a sweep searches over `data.path`; its trials refuse other data than they have begun with.

    Raises:
        DataError: see `check_same_data`.
        ExperimentError: a method remembers each image, or a sweep searches over its data.
    """
    if data is None:
        if accept_new:
            raise ExperimentError("--accept-new-data: a sweep over data.path goes on with the data of each trial: leave it out")
    elif result.data is None:
        notice(f"{run} does not say on what data it was begun: whether that has changed is not checked")
    elif not check_same_data(run, result.data, data, accept=accept_new):
        if accept_new:
            notice("--accept-new-data: the data is that of before: the run goes on as without it")
    elif methods := [name for name in method_names(experiment) if load_method(name).requires.same_images]:
        raise ExperimentError(
            f"--accept-new-data: distill.method {methods[0]} remembers each training image of before: restore the data, or "
            "choose another --out"
        )


def check_checkpoints(run_dir: RunDir, result: RunResult) -> None:
    """Refuse to resume from a checkpoint that is damaged. Raises CheckpointError: which, and what to do with it."""
    stages = stages_with("checkpoints/last.safetensors", run_dir, result)
    # A complete init stage is read too: the stage after it begins with that.
    unfinished = [stage for stage in stages if not stage.result.exists() or stage.root.name.endswith("-init")]
    needed = [(stage.last, stage.best, stage) for stage in unfinished]
    for name in read_resolved(run_dir.experiment).experiment.preparation:
        if (done := run_dir.stage(name)).result.exists():
            needed.append((done.best, done.last, done))
    for path, other, stage in needed:
        try:
            if read_checkpoint_header(path) is None:
                raise CheckpointError(f"{path} is not a checkpoint of ours")
        except CheckpointError as error:
            copy = f"copy {other.name} over it to go on from there, or " if other.exists() else ""
            raise CheckpointError(
                f"{str(error).removesuffix('; use another copy')}: {copy}remove {stage.root} to begin that stage again"
            ) from error
