"""Whether models, methods and options of an experiment fit together, tried once for all points that do not differ in them.

Torch is imported late.
"""

from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

from service.config.batch_size import AUTO, with_number
from service.config.schema import Experiment
from trainables.config import DataConfig, TrainConfig
from trainables.data.source import open_source
from trainables.errors import DistillError, ExperimentError
from trainables.failures import kind_of
from trainables.notices import notice
from trainables.rules import RULES, first_problem, parts_have_several_images


def check_fits(experiment: Experiment, num_classes: int, stages: Iterable[str]) -> None:
    """Refuse stages, `assistant1` … or `student`, whose models, methods and options do not fit together.

    Raises ExperimentError: one line, the same that the stage's own job would end with.
    """
    for name in stages:
        settings = experiment.stage(name, Path("/"), {}, "the weights of the stage before it")
        if reason := _broken_rule(settings) or _fit(_deciding_config(experiment, name), num_classes)[0]:
            raise ExperimentError(reason)


def _broken_rule(settings: TrainConfig) -> str | None:
    """Which rule a stage, or its init stage, breaks."""
    if (problem := first_problem(settings, RULES)) or settings.distill is None:
        return problem
    from trainables.methods.init_stage import with_init_stage

    return next((problem for each in with_init_stage(settings) if (problem := first_problem(each, RULES))), None)


def check_parts(experiment: Experiment, num_images: int, num_classes: int, stages: Iterable[str]) -> None:
    """Refuse stages that would train a batch norm on one value of each channel. `num_images`: of the training split.

    Raises ExperimentError.
    """
    for name in stages:
        config = experiment.stage(name, Path("/"), {})
        problem = parts_have_several_images(config, num_images)
        if problem is None:
            continue
        from trainables.engine.dry_run import normalizes_single_images

        if not normalizes_single_images(config, num_classes):
            raise ExperimentError(f"{problem}; the batch norm of {config.model} cannot normalize one image")


def note_cache_size(experiment: Experiment, num_images: int, num_classes: int) -> None:
    """Say how large the `teacher.cache` of each stage becomes. `num_images`: of the training split."""
    for name in [name for name in experiment.preparation if name != "teacher"] + ["student"]:
        for row_format in _fit(_deciding_config(experiment, name), num_classes)[1]:
            from trainables.teachers.cache.cached_teacher import cached_epochs, describe_size

            config = experiment.stage(name, Path("/"), {})
            num_epochs = cached_epochs(config)
            notice(f"teacher.cache: {describe_size(row_format, num_images, num_epochs)}")
            if row_format.mixed and num_epochs < config.optim.epochs:
                notice(
                    f"data.device_augment: the order of the images repeats every {num_epochs} epochs, with their augmentations: "
                    "an image is mixed with its neighbor"
                )


def note_warmup(experiment: Experiment, num_images: int) -> None:
    """Say where the student's training is shorter than its `optim.warmup_steps`. `num_images`: of the training split."""
    config = experiment.stage("student", Path("/"), {})
    optim, batch = config.optim, config.data.global_batch_size
    per_epoch = num_images // batch if config.data.last_batch == "drop" else -(-num_images // batch)
    if optim.warmup_steps > (steps := optim.epochs * per_epoch):
        notice(f"optim.warmup_steps {optim.warmup_steps:,}: the training has {steps:,}, all of which are warm-up")


def note_milestones(experiment: Experiment) -> None:
    """Say which trainings end before the first of `optim.milestones`, as a recipe's do after fewer epochs than it has."""
    for name in [*experiment.trained_before, "student"] if experiment.train.max_steps is None else []:
        optim = experiment.stage(name, Path("/"), {}).optim
        if optim.schedule == "step" and optim.milestones and min(optim.milestones) >= optim.epochs:
            notice(
                f"optim.milestones {list(optim.milestones)}: the {name} ends before them, after {optim.epochs} epochs: "
                "its learning rate never falls"
            )


def training_lengths(experiment: Experiment) -> Iterator[str]:
    """Yield how long each training of a run is: its epochs, images and optimizer steps. Raises DataError: see `open_source`."""
    from trainables.methods.init_stage import with_init_stage

    timed = experiment.train.max_steps is not None
    if experiment.data.global_batch_size == AUTO:
        experiment = with_number(experiment)
        yield f"batch: decided when the training begins; with the smallest that is tried, {experiment.data.global_batch_size}:"
    for name in [*([] if timed else experiment.trained_before), "student"]:
        for config in with_init_stage(experiment.stage(name, Path("/"), {})):
            yield f"{config.stage}: {_length(config)}"


def _length(config: TrainConfig) -> str:
    train, batch = config.train, config.data.global_batch_size
    if train.max_steps is not None:
        return f"{train.warmup_steps + train.max_steps:,} steps of {batch:,} images, to time them"
    samples = _samples_per_epoch(config.data.model_copy(update={"stage": "none"}).model_dump_json(), config.seed)
    steps = samples // batch if config.data.last_batch == "drop" else -(-samples // batch)
    shown = min(steps * batch, samples)
    until = "at most " if train.until_top1_pct is not None or train.until_s is not None else ""
    epochs = config.optim.epochs
    return f"{until}{epochs:,} epoch{'s' * (epochs != 1)} of {shown:,} images: {epochs * steps:,} steps of {batch:,}"


@cache
def _samples_per_epoch(data_json: str, seed: int) -> int:
    data = DataConfig.model_validate_json(data_json)
    return open_source(data, "train").order(data, "train", seed).num_samples


def num_classes_of(data: DataConfig) -> int:
    """How many classes a data set has. Raises DataError: it cannot be opened."""
    return _num_classes(data.path, data.synthetic_classes, data.val_share) if data.labels else 0


@cache
def _num_classes(path: str, synthetic_classes: int, val_share: float | None) -> int:
    """Batch sizes and the like do not change that."""
    return len(open_source(DataConfig(path=path, synthetic_classes=synthetic_classes, val_share=val_share), "val").classes)


def _deciding_config(experiment: Experiment, stage: str) -> str:
    """What decides whether a stage fits, as JSON: the same for points that differ elsewhere, as in learning rate or seed."""
    config = experiment.stage(stage, Path("/"), {})
    scale = config.scale
    deciding = {"name", "args", "momentum", "nesterov", "warmup_epochs"}
    of_section = {"delta", "accumulate", "epochs", "lr_head", "layer_decay", "clip_grad_agc"}
    optim = config.optim.model_dump(include=deciding | of_section)
    losses = {name: loss.model_dump(include=deciding) for name, loss in config.optim.losses.items()}
    whole = {
        "output_dir": "/",
        "model": config.model,
        "finetuned": config.finetuned,
        "teacher": config.teacher,
        "teachers": config.teachers,
        "distill": config.distill,
        "optim": {**optim, "losses": losses},
        "data": config.data.model_dump(include={"image_size", "global_batch_size", "labels", "device_augment"}),
        "train": config.train.model_dump(include={"gradient_checkpointing", "progressive"}),
        "precision": config.precision,
        "scale": scale.model_dump(include={"sync_batch_norm", "pipeline_stages", "micro_batches", "cut"})
        | {"num_workers": scale.pipeline_stages},
    }
    return TrainConfig.model_validate(whole).model_dump_json()


@cache
def _fit(config_json: str, num_classes: int) -> tuple[str | None, list[Any]]:
    """Why a stage is refused, and the rows of its teachers' caches, see `check_fit`."""
    from trainables.engine.dry_run import check_fit

    try:
        return None, check_fit(TrainConfig.model_validate_json(config_json), num_classes)
    except DistillError as error:
        # Where it runs there may be more memory than here; if not, it ends as `oom`.
        return None if kind_of(error) == "out_of_memory" else str(error), []
