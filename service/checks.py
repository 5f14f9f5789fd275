"""What can be refused before Ray starts: names, data, weights and their fit, in seconds instead of a worker's start."""

from __future__ import annotations

from typing import Literal

from service.experiment import Experiment
from trainables.data.source import open_source
from trainables.errors import DataError
from trainables.methods import check_method
from trainables.models.registry import check_model_name


def check_inputs(experiment: Experiment, kind: Literal["train", "sweep"]) -> None:
    """Refuse what the workers would refuse later.

    Raises:
        DistillError: one line.
    """
    check_method(experiment.distill)
    for section in filter(None, (experiment.teacher, experiment.student)):
        check_model_name(section.model)
    data = experiment.data
    train, val = open_source(data, "train"), open_source(data, "val")
    if data.last_batch == "drop" and len(train) < data.global_batch_size:
        raise DataError(
            f"data.global_batch_size: {data.global_batch_size} is more than the {len(train)} training images of {data.path}; "
            f"write at most {len(train)}, or data.last_batch=short"
        )
    teacher = experiment.teacher
    if teacher is not None and teacher.weights and (experiment.distill.soft_weight or experiment.distill.method_weight):
        from trainables.models.weights import load_teacher

        load_teacher(
            teacher.model,
            teacher.weights,
            num_classes=len(val.classes),
            image_size=data.image_size,
            classes=val.classes,
            seed=experiment.seed,
        )
