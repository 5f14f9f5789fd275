"""Whether the models, methods and options of a job fit together, found out with models that nobody has trained.

Built on the CPU as the job itself would build them, in a second or so: what does not fit is known before a teacher is trained.
"""

from __future__ import annotations

import torch

from trainables.config import TrainConfig
from trainables.distributed.batch_norm import convert
from trainables.distributed.group import Group
from trainables.engine.modules import readers_of, unite
from trainables.methods.select import select_methods, student_name
from trainables.models.registry import build_model, construct
from trainables.teachers.ensemble import TeacherEnsemble


def check_fit(config: TrainConfig, num_classes: int) -> None:
    """Refuse what `trainables.engine.job.build` would refuse of the models and methods of `config`; no weights are read.

    Raises:
        ExperimentError, ModelError: one line.
    """
    size, seed = config.data.image_size, config.seed
    name = student_name(config.model, config.teacher, select_methods(config.distill) if config.distill is not None else ())
    student = build_model(name, num_classes=num_classes, image_size=size, seed=seed)
    if config.scale.sync_batch_norm:
        student = convert(student, Group())
    teacher, given = None, config.teacher
    if given is not None and given.logits_only is None and readers_of(config):
        names = (given.model, *(other.model for other in given.others))
        models = [construct(model, num_classes=num_classes, image_size=size, seed=seed) for model in names]
        teacher = (TeacherEnsemble(models) if given.others else models[0]).eval().requires_grad_(False)
    labels_M = torch.arange(num_classes)  # what a method keeps of each sample is small here
    unite(config, Group(), student, teacher, num_classes, labels_M)
