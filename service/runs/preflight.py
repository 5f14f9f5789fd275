"""What can be refused before Ray starts: data, places, weights and their fit, in seconds instead of a worker's start.

Names, values and their fit among each other are refused earlier, when the experiment is read. The cheapest check comes first;
only the last ones import torch.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from service.cluster import resources as clusters
from service.config.experiment import Experiment, Resolved, read_resolved
from service.runs.dry_run import check_fits, refuse_misfits
from service.runs.plan import Plan
from service.tracking.tracker import check_store
from trainables.config import DataConfig
from trainables.data.decode import UnreadableImageError, decode_image
from trainables.data.source import Source, check_placement, open_source
from trainables.data.storage.remote import is_remote
from trainables.errors import CheckpointError, DataError, ExperimentError
from trainables.models.checkpoint_header import read_checkpoint_header
from trainables.rundir import RunDir, StageDir, unwritable

if TYPE_CHECKING:
    from service.sweeps.trials import Trial

PROBED_IMAGES = 8


def check_inputs(resolved: Resolved, kind: Literal["train", "sweep"]) -> None:
    """Refuse what the workers would refuse later.

    Raises:
        DistillError: one line.
    """
    experiment = resolved.experiment
    if not clusters.is_local():
        clusters.knock(os.environ["RAY_ADDRESS"])
    if experiment.tracking.enabled and experiment.tracking.uri:
        check_store(experiment.tracking.uri)
    check_cache(experiment, kind)
    trials = check_points(resolved) if kind == "sweep" else []
    searched = frozenset(experiment.sweep.axes) if kind == "sweep" else frozenset()
    teacher = experiment.teacher
    trains_base = kind == "train" or bool(experiment.assistants) or (teacher is not None and teacher.weights is None)
    if kind == "train":  # a point of a sweep that does not fit is a row, not an error
        check_room(experiment)
    if "data.path" in searched:
        return
    if not {"data.stage", "data.cache"} & searched:
        check_placement(experiment.data)
    train, val = (check_source(experiment.data, split) for split in ("train", "val"))
    batch = experiment.data.global_batch_size
    if trains_base and experiment.data.last_batch == "drop" and len(train) < batch:
        raise DataError(
            f"data.global_batch_size: {batch} is more than the {len(train)} training images of {experiment.data.path}; "
            f"write at most {len(train)}, or data.last_batch=short"
        )
    if "data.image_size" not in searched:
        check_models(experiment, val.classes)
        check_fits(experiment, len(val.classes), [name for name in experiment.preparation if name != "teacher"])
    if kind == "train":
        check_fits(experiment, len(val.classes), ["student"])
    else:
        refuse_misfits(trials)
        check_any_runs(trials)


def check_points(resolved: Resolved) -> list[Trial]:
    """Refuse a sweep without a single point that could run. Returns all of its points.

    Raises:
        ExperimentError: nothing to search, or the reason why the first point cannot run.
    """
    from service.sweeps.trials import plan_trials, refuse

    trials = plan_trials(resolved)
    if clusters.is_local():
        refuse(trials, clusters.local_capacity())
    check_any_runs(trials)
    return trials


def check_any_runs(trials: Sequence[Trial]) -> None:
    """Refuse trials of which none is left to run. Raises ExperimentError with the first one's reason."""
    if all(trial.outcome is not None for trial in trials):
        reason = trials[0].outcome.reason if trials[0].outcome else ""
        raise ExperimentError(f"sweep.space: none of its {len(trials)} points can run; the first: {reason}")


def check_room(experiment: Experiment) -> None:
    """Refuse what a Ray of our own could not hold; a cluster's size is known once we are connected.

    Raises:
        ClusterError: see `Plan.check`.
    """
    if clusters.is_local():
        capacity = clusters.local_capacity()
        Plan.on(experiment, capacity).check(capacity)


def check_cache(experiment: Experiment, kind: Literal["train", "sweep"]) -> None:
    """Refuse a `teacher.cache` that will have to be written and cannot be: its teacher would be trained for nothing.

    One that is full already may be read-only; a teacher that is still to be trained cannot have filled it.

    Raises:
        ExperimentError: see above.
    """
    cache = experiment.written_cache(kind)
    if cache is None:
        return
    trained = experiment.teacher is not None and experiment.teacher.weights is not None and not experiment.assistants
    if (reason := unwritable(cache)) and not (trained and cache.is_dir()):
        raise ExperimentError(f"teacher.cache: {cache} cannot be written: {reason}; name another folder")


def check_source(data: DataConfig, split: Literal["train", "val"]) -> Source:
    """Open a split and look at a few of its images, spread over it; of a set behind a URI at the index alone.

    Raises:
        DataError: it is missing or empty, or not one of those images can be read.
    """
    # The nodes' folders are not this machine's.
    source = open_source(data.model_copy(update={"stage": "none"}), split)
    if is_remote(data.path):  # an image would cost the whole shard that it lies in
        return source
    probed = range(0, len(source), -(-len(source) // PROBED_IMAGES))
    reasons = []
    for index in probed:
        try:
            decode_image(source.read(index))
            return source
        except UnreadableImageError as error:
            reasons.append(f"{source.name(index)} ({error})")
    raise DataError(
        f"data.path: {data.path}: not one of {len(reasons)} images looked at can be read, such as {reasons[0]}; give whole images"
    )


def check_models(experiment: Experiment, classes: tuple[str, ...]) -> None:
    """Build the teachers for these classes, or load their weights. Imports torch.

    Raises:
        ModelError, CheckpointError: one does not fit; one line.
    """
    from trainables.methods.select import select_methods
    from trainables.models.registry import build_model
    from trainables.models.weights import load_teacher

    teacher, distill = experiment.teacher, experiment.distill
    size, seed = experiment.data.image_size, experiment.seed
    if teacher is not None and teacher.weights is None:
        build_model(teacher.model, num_classes=len(classes), image_size=size, seed=seed)
    if teacher is not None and select_methods(distill):
        weights = [(teacher.model, teacher.weights), *((other.model, other.weights) for other in teacher.others)]
        for model, path in weights:
            if path is not None:
                load_teacher(model, path, num_classes=len(classes), image_size=size, classes=classes, seed=seed)


def check_checkpoints(run_dir: RunDir) -> None:
    """Refuse to resume from a checkpoint that is damaged.

    Raises:
        CheckpointError: which, and what to do with it.
    """
    stages = [StageDir(path.parent.parent) for path in sorted(run_dir.root.rglob("checkpoints/last.safetensors"))]
    needed = [(stage.last, stage.best, stage) for stage in stages if not stage.result.exists()]
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
