"""What can be refused before Ray starts: data, folders, weights, and whether they fit together.

That takes seconds instead of a worker's start. Names, values and their combinations are refused earlier, when the experiment is
read. The cheapest check comes first; only the last ones import torch.
"""

from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from service.cluster.connect import check_ray_address
from service.cluster.resources import is_local, local_capacity
from service.config.batch_size import AUTO, with_number
from service.config.experiment import Resolved, read_resolved
from service.config.rules import method_names
from service.config.schema import Experiment
from service.runs.dry_run import check_fits, check_parts, note_cache_size, note_milestones, note_warmup
from service.runs.finetuning import with_finetuning
from service.runs.plan import Plan
from service.runs.result import Kind, RunResult
from service.runs.run_directory import stages_with
from service.runs.run_log import read_log
from service.runs.stored.stored_runs import uri_of
from service.runs.unread_keys import note_unread
from service.tracking.stores import check_store
from trainables.config import DataConfig, DataIdentity, TeacherConfig
from trainables.config.models import FOLDER_SCHEME, HUB_SCHEMES
from trainables.data.decode import UnreadableImageError, decode_image
from trainables.data.identity import check_same_data, data_identity
from trainables.data.interface import HOLD_OUT, NO_LABELS, Source
from trainables.data.source import SOURCES, check_placement, open_source, refuse_single_class
from trainables.errors import CheckpointError, DataError, ExperimentError
from trainables.methods.registry import load_method
from trainables.models.checkpoint_header import read_checkpoint_header
from trainables.notices import notice
from trainables.object_store.store import is_uri
from trainables.rules import enough_images
from trainables.rundir import RunDir, unwritable_reason

PROBED_IMAGES = 8


def check_train(resolved: Resolved) -> tuple[Resolved, DataIdentity]:
    """Refuse a run that its workers would refuse later.

    Returns the experiment with its `teacher.finetune`, and what its data is. With `data.global_batch_size: auto`, the smallest
    batch that will be tried is checked. Raises DistillError.
    """
    written = resolved.experiment.data
    resolved = replace(resolved, experiment=with_number(resolved.experiment))
    experiment = resolved.experiment
    check_services(experiment, "train")
    note_unread(resolved)
    if is_local():  # a cluster's size is known once we are connected
        capacity = local_capacity()
        Plan.on(experiment, capacity).check(capacity)
    resolved, data = check_data(resolved)
    check_fits(resolved.experiment, len(data.classes), ["student"])
    if written.global_batch_size != AUTO:
        note_warmup(resolved.experiment, data.train.num_images)
    note_milestones(resolved.experiment)
    if resolved.experiment.written_cache("train") is not None:
        note_cache_size(resolved.experiment, data.train.num_images, len(data.classes))
    return replace(resolved, experiment=resolved.experiment.model_copy(update={"data": written})), data


def check_services(experiment: Experiment, kind: Kind) -> None:
    """Refuse a Ray that does not answer, an MLflow store or server and a `teacher.cache` that cannot be written.

    Raises:
        ClusterError: Ray does not answer.
        ExperimentError: the store or the cache cannot be written, or the server will never take records.
    """
    check_ray_address()
    if experiment.tracking.enabled and experiment.tracking.uri:
        check_store(experiment.tracking.uri, experiment.tracking.experiment)
    cache = experiment.written_cache(kind)
    if cache is not None and (reason := unwritable_reason(cache)):
        # One that is full already may be read-only; a teacher that is still to be trained cannot have filled it.
        trained = experiment.teacher is not None and not experiment.teacher.needs_training and not experiment.assistants
        if not (trained and cache.is_dir()):
            raise ExperimentError(f"teacher.cache: {cache} cannot be written: {reason}; name another folder")


def check_data(resolved: Resolved, searched: Collection[str] = ()) -> tuple[Resolved, DataIdentity]:
    """Refuse data that cannot be read, and models that do not fit it.

    Returns the experiment with its `teacher.finetune`, see `with_finetuning`, and what its data is.

    `searched`: the keys of a sweep, whose values are not the experiment's.

    Raises DistillError.
    """
    experiment = resolved.experiment
    if "data.stage" not in searched:
        for each in experiment.data.sets:
            check_placement(each)
    train, val = (check_source(experiment.data, split) for split in ("train", "val"))
    data = data_identity(train, val)
    own = train.sets[0]
    note_equal_splits(experiment.data, data if own is train else data_identity(own, val))
    note_shared_images(experiment.data, train, val)
    if len(val) > len(own):
        notice(f"data.path: {experiment.data.path} has {len(own)} training and {len(val)} validation images: are they swapped?")
    resolved = with_finetuning(resolved, val.classes)
    experiment, preparation = resolved.experiment, resolved.experiment.trained_before
    trained = [*(preparation if experiment.train.max_steps is None else []), *([] if searched else ["student"])]
    for name in trained:
        if problem := enough_images(experiment.stage(name, Path("/"), {}).data, len(own)):
            raise DataError(problem)
    if (labeled := experiment.eval.labeled(experiment.data)) is not None:
        try:
            for split in ("train", "val"):
                check_source(labeled, split)
        except DataError as error:
            text = str(error).removeprefix("data.path: ").removesuffix(f"; {HOLD_OUT}").removesuffix(f"; {NO_LABELS}")
            raise DataError(f"eval.path: {text}") from None
    if "data.image_size" not in searched:
        check_models(experiment, val.classes)
        check_fits(experiment, len(val.classes), preparation)
        check_parts(experiment, len(own), len(val.classes), trained)
    return resolved, data


def note_equal_splits(data: DataConfig, identity: DataIdentity) -> None:
    """Say where an accuracy would be one on the training images."""
    train, val = identity.train, identity.val
    if (train.labels, train.contents) == (val.labels, val.contents):
        notice(f"data.path: {data.path}: the validation images are the training images: accuracy on them says little")


def note_shared_images(data: DataConfig, train: Source, val: Source) -> None:
    """Say which sets of `data.more` have files that validate; a packed set has no names of files."""

    def files(path: str, source: Source) -> Iterator[Path]:
        if path not in SOURCES and source.checksums_sha256() is None:
            root = Path(path).parent if Path(path).is_file() else Path(path)  # a list names files next to it
            yield from (root / source.name(index) for index in range(len(source)))

    held_out = {*files(data.path, val)} if data.more else set()
    for each, source in zip(data.more, train.sets[1:], strict=True):
        if held_out and (shared := sum(file in held_out for file in files(each.path, source))):
            notice(f"data.more: {shared:,} images of {each.path} are validation images too: a measure of these says little")


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
    """Load the weights of the teachers for these classes, and those that a model begins with. Imports torch.

    Raises:
        ModelError: a model does not take these images or classes, or its published weights do not.
        CheckpointError: a file of weights cannot be read, or is of another model or other classes.
    """
    from trainables.methods.select import select_methods
    from trainables.models.model_input import input_warnings, trained_model_input
    from trainables.models.registry import build_model
    from trainables.models.weights import begin_with, load_teacher
    from trainables.teachers.network import by_key, fit, naming

    for stage in (*experiment.trained_before, "student"):
        config = experiment.stage(stage, Path("/"), {})
        if config.weights is not None:
            size = trained_model_input(config).image_size
            model = build_model(config.model, num_classes=len(classes), image_size=size, seed=config.seed)
            start: dict[str, Any] = {"image_size": size, "classes": classes, "seed": config.seed}
            begin_with(model, config.model, config.weights, **start, weights_key=config.weights_key)
    if experiment.weights is not None:
        for line in input_warnings(experiment.student, experiment.data, "student"):
            notice(line)
    elif experiment.model.startswith((FOLDER_SCHEME, *HUB_SCHEMES)):
        notice(f"student {experiment.model}: it begins with random weights; student.weights: DEFAULT begins with its own")
    if experiment.all_teachers and select_methods(experiment.distill):
        for key, each in by_key(experiment.all_teachers):
            if each.weights is not None:
                with naming(key):
                    if experiment.data.path != "synthetic":
                        for line in input_warnings(each, experiment.data, key):
                            notice(line)
                    if not (isinstance(each, TeacherConfig) and each.needs_training):
                        features_alone = isinstance(each, TeacherConfig) and each.head is not None
                        load_teacher(**fit(each, config, classes) | ({"classes": (), "logits": False} if features_alone else {}))


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
            raise ExperimentError("--accept-new-data: a sweep over data.path continues with the data of each trial: leave it out")
    elif result.data is None:
        notice(f"{run} does not record its training data: whether it has changed is not checked")
    elif not check_same_data(run, result.data, data, accept=accept_new):
        if accept_new:
            notice("--accept-new-data: the data has not changed: it is not needed")
    elif methods := [name for name in method_names(experiment) if load_method(name).requires.same_images]:
        raise ExperimentError(
            f"--accept-new-data: distill.method {methods[0]} remembers each training image of before: restore the data, or "
            "choose another --out"
        )


def check_checkpoints(run_dir: RunDir, result: RunResult) -> None:
    """Refuse to resume from a checkpoint that is damaged. Raises CheckpointError: which, and what to do with it.

    In an object store each is whole or not there.
    """
    if uri_of(run_dir.root):
        return
    log = read_log(run_dir)
    complete = {run_dir.root / name for name in log.stages if log.is_complete(name)}
    needed = [
        (stage.last, stage.best, stage)
        for stage in stages_with("checkpoints/last.safetensors", run_dir, result)
        if stage.root not in complete or stage.root.name.endswith("-init")  # the stage after an init stage begins with that
    ]
    for stage in map(run_dir.stage, read_resolved(run_dir.experiment).experiment.preparation):
        if stage.root in complete:
            needed.append((stage.best, stage.last, stage))
    for path, other, stage in needed:
        try:
            if read_checkpoint_header(path) is None:
                raise CheckpointError(f"{path} is not a checkpoint of ours")
        except CheckpointError as error:
            copy = f"copy {other.name} over it to continue from there, or " if other.exists() else ""
            raise CheckpointError(
                f"{str(error).removesuffix('; use another copy')}: {copy}remove {stage.root} to begin that stage again"
            ) from error
