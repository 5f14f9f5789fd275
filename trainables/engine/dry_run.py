"""Whether the models, methods and options of a job fit together, checked with untrained models on the CPU.

They are built as the job itself would build them, in a second or so: an error shows before a teacher is trained.
"""

import torch
from torch import nn

from trainables.config import TrainConfig
from trainables.distributed.group import Group
from trainables.engine.modules import (
    build_distillation_module,
    build_student,
    method_reads,
    methods_with_teacher,
    reads_features,
)
from trainables.engine.pipeline.build import possible_cuts
from trainables.failures import is_single_value
from trainables.methods.distillation_module import DistillationModule
from trainables.methods.init_stage import with_init_stage
from trainables.methods.tap_reader import TapReader
from trainables.models.forward import dry_forward
from trainables.teachers.cache.cached_teacher import cached_format
from trainables.teachers.network import untrained_network
from trainables.teachers.rows import RowFormat


def check_fit(config: TrainConfig, num_classes: int) -> RowFormat | None:
    """Raise what `trainables.engine.train.build` would raise of the models and methods of `config`; no weights are read.

    Returns the rows of its cache, if it has one.

    Raises:
        ExperimentError: methods and options do not fit together, or cannot be trained in stages.
        ModelError: a model does not exist, does not take these images, or cannot be cut so.
    """
    for each in with_init_stage(config):
        module, _, reader = _untrained(each, num_classes)
        if config.scale.pipeline_stages > 1:
            possible_cuts(each, module)
    methods = methods_with_teacher(config)
    cached = config.teacher is not None and config.teacher.cache is not None and bool(methods)
    return cached_format(config, num_classes, method_reads(methods, reader)) if cached else None


def normalizes_single_images(config: TrainConfig, num_classes: int) -> bool:
    """Whether the student can be trained on a batch of one image, which batch norm refuses where a map has one position."""
    _, student = build_student(config, Group(), num_classes)
    try:
        dry_forward(student, config.data.image_size, training=True, batch_size=1)
    except ValueError as error:
        if not is_single_value(error):
            raise
        return False
    return True


def untrained_modules(config: TrainConfig, num_classes: int) -> tuple[DistillationModule, nn.Module | None]:
    """The distillation module of a job, and the teacher's network where one runs in its steps; no weights are read.

    Raises:
        ExperimentError: methods and options do not fit together.
        ModelError: a model does not exist, or does not take these images.
    """
    module, network, _ = _untrained(config, num_classes)
    return module, network if config.teacher is not None and config.teacher.rows_from is None else None


def _untrained(config: TrainConfig, num_classes: int) -> tuple[DistillationModule, nn.Module | None, TapReader | None]:
    """The distillation module of a job, its teacher's network where methods are built for one, and the reader of that."""
    _, student = build_student(config, Group(), num_classes)
    network, teacher, methods = None, config.teacher, methods_with_teacher(config)
    if teacher is not None and methods and (teacher.rows_from is None or reads_features(methods)):
        network = untrained_network(config, num_classes)
    labels_M = torch.arange(num_classes)  # a small training split, so that buffers with a row a sample are small
    module, reader = build_distillation_module(config, Group(), student, network, num_classes, labels_M)
    return module, network, reader
