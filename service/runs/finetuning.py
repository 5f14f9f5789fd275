"""Decides whether a teacher with given weights is fine-tuned before it teaches. Torch is imported late."""

from pathlib import Path

from service.config.experiment import Resolved
from service.config.rules import needs_teacher, reads_teacher_classes
from trainables.errors import ExperimentError
from trainables.notices import notice

OTHER_CLASSES = "the classes of teacher.weights"
"""The source of a `teacher.finetune` that the user did not write."""


def with_finetuning(resolved: Resolved, classes: tuple[str, ...]) -> Resolved:
    """Set `teacher.finetune: true` if it is unset, the weights have other classes than the data, and a method reads these.

    This is decided once per run, and written to its `experiment.yaml`. Fine-tuning is a notice, and so is an unused
    `teacher.lr`, `lr_head` or `layer_decay`.

    Raises DistillError: the weights cannot be read, or their classes may be the data's under other names.
    """
    from trainables.models.model_input import teacher_input
    from trainables.models.weights import other_classes

    experiment, teacher, why = resolved.experiment, resolved.experiment.teacher, ""
    if teacher is None or teacher.weights is None or not needs_teacher(experiment.distill, experiment.sweep.axes):
        return resolved
    if teacher.head is not None:
        if not reads_teacher_classes(experiment):
            raise ExperimentError("teacher.head: no distill.method reads the teacher's logits: leave it out")
        notice(
            f"teacher {teacher.model}: its classifier is the mean feature of each of the data's {len(classes)} classes, computed "
            "from the training images before it teaches (teacher.head)"
        )
    elif teacher.finetune is None and teacher.classes is None and classes and reads_teacher_classes(experiment):
        error = other_classes(
            teacher.model,
            teacher.weights,
            image_size=teacher_input(teacher, experiment.data).image_size,
            classes=classes,
            seed=experiment.seed,
            weights_key=teacher.weights_key,
        )
        if error is not None:
            why = f": its {error.num_classes} classes are not the data's" if error.num_classes else ": it has no classifier"
            resolved = resolved.override({"teacher.finetune": True}, OTHER_CLASSES)
            teacher = resolved.experiment.teacher
    assert teacher is not None
    if teacher.needs_training:
        optim = resolved.experiment.stage("teacher", Path("/"), {}).optim
        without = ", without data.more," if experiment.data.mixes_unlabeled else ""
        notice(
            f"teacher {teacher.model}{why}: it is fine-tuned on the data's {len(classes)} classes{without} before it teaches, "
            f"for {optim.epochs} epoch{'s' * (optim.epochs != 1)} with learning rate {optim.lr:g} (teacher.epochs, teacher.lr)"
        )
    elif idle := [key for key in ("lr", "lr_head", "layer_decay") if getattr(teacher, key) is not None]:
        notice(
            f"teacher.{idle[0]}: the teacher is not trained: its weights teach as they are; teacher.finetune: true trains them"
        )
    return resolved
