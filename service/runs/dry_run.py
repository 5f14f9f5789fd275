"""What of an experiment does not fit together, asked once for all of its points that are alike in it. Torch is imported late."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from service.config.experiment import Experiment
from service.runs.trial import Outcome
from trainables.config import DataConfig, TrainConfig
from trainables.data.source import open_source
from trainables.errors import DataError, DistillError, ExperimentError
from trainables.failures import kind_of

if TYPE_CHECKING:
    from service.sweeps.trials import Trial

_UNTRAINED = "-"
"""Of a teacher whose weights are not looked at."""


def check_fits(experiment: Experiment, num_classes: int, stages: Iterable[str]) -> None:
    """Refuse stages, `assistant1` … or `student`, whose models, methods and options do not fit together.

    Raises:
        ExperimentError: one line, the same that the stage's own job would end with.
    """
    for name in stages:
        if reason := _misfit(_told(experiment, name), num_classes):
            raise ExperimentError(reason)


def refuse_misfits(trials: Iterable[Trial]) -> None:
    """Mark as `infeasible` the points whose student could not be built with its methods."""
    for trial in trials:
        if trial.outcome is None and trial.resolved is not None:
            experiment = trial.resolved.experiment
            try:
                check_fits(experiment, _num_classes(experiment.data.path, experiment.data.synthetic_classes), ["student"])
            except DataError:
                continue  # a search over data.path: the trial itself says what is wrong with it
            except ExperimentError as error:
                trial.outcome = Outcome("infeasible", str(error))


@cache
def _num_classes(path: str, synthetic_classes: int) -> int:
    """Of a data set however it is read: batch sizes and the like do not change them."""
    return len(open_source(DataConfig(path=path, synthetic_classes=synthetic_classes), "val").classes)


def _told(experiment: Experiment, stage: str) -> str:
    """What decides whether a stage fits: points that differ elsewhere, as in learning rate, workers or seed, are alike."""
    config = experiment.stage(stage, Path("/"), {}, _UNTRAINED)
    one = {"name", "momentum", "nesterov", "warmup_epochs"}
    optim = config.optim.model_dump(include={*one, "delta", "accumulate", "epochs"})
    losses = {key: own.model_dump(include=one) for key, own in config.optim.losses.items()}
    whole = TrainConfig.model_validate({
        "output_dir": "/", "model": config.model, "teacher": config.teacher, "distill": config.distill,
        "optim": {**optim, "losses": losses},
        "data": config.data.model_dump(include={"image_size", "global_batch_size"}),
        "precision": config.precision, "scale": config.scale.model_dump(include={"sync_batch_norm"}),
    })  # fmt: skip
    return whole.model_dump_json()


@cache
def _misfit(told: str, num_classes: int) -> str | None:
    from trainables.engine.dry_run import check_fit

    try:
        check_fit(TrainConfig.model_validate_json(told), num_classes)
    except DistillError as error:
        # Where it runs there may be more memory than here; if not, it ends as `oom`.
        return None if kind_of(error) == "out_of_memory" else str(error)
    return None
