"""Check with untrained models on the CPU that the models, methods and options of a job fit together.

Models are built as the job itself builds them. This takes about a second, and finds errors before a teacher is trained.
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
from trainables.engine.optim import clipping, learning_rate_scales
from trainables.engine.optimizers import check_optimizer
from trainables.engine.pipeline.build import possible_cuts
from trainables.failures import is_single_value
from trainables.methods.distillation_module import DistillationModule
from trainables.methods.init_stage import with_init_stage
from trainables.methods.tap_reader import TapReader
from trainables.models.forward import dry_forward
from trainables.models.model_input import trained_model_input
from trainables.teachers.cache.cached_teacher import cached_format
from trainables.teachers.network import untrained_networks
from trainables.teachers.rows import RowFormat


def check_fit(config: TrainConfig, num_classes: int) -> list[RowFormat]:
    """Raise what `trainables.engine.train.build` would raise of the models and methods of `config`; no weights are read.

    Returns the rows of each teacher's cache, if they have one.

    Raises:
        ExperimentError: methods and options do not fit together, cannot run in stages, or the optimizer does not exist.
        ModelError: a model does not exist, does not accept these images, or cannot be cut like that.
    """
    for each in with_init_stage(config):
        for optim in (each.optim, *map(each.optim.for_loss, each.optim.losses)):
            check_optimizer(optim)
        module, _, readers = _untrained(each, num_classes)
        clipping(each.optim, module.student)
        learning_rate_scales(module.student, each.optim)
        if config.scale.pipeline_stages > 1:
            possible_cuts(each, module)
    methods = methods_with_teacher(config)
    if config.rows_from != "teacher.cache" or not methods:
        return []
    numbers = range(len(config.all_teachers))
    return [cached_format(config.of_teacher(n), num_classes, method_reads(methods, readers, n)) for n in numbers]


def normalizes_single_images(config: TrainConfig, num_classes: int) -> bool:
    """Return whether the student can train on a batch of one image, which batch norm refuses for 1×1 maps."""
    _, student = build_student(config, Group(), num_classes)
    try:
        dry_forward(student, trained_model_input(config).image_size, training=True, batch_size=1)
    except ValueError as error:
        if not is_single_value(error):
            raise
        return False
    return True


def untrained_modules(config: TrainConfig, num_classes: int) -> tuple[DistillationModule, list[nn.Module]]:
    """Return a job's distillation module and the teacher networks that run in its steps, without reading weights.

    Raises:
        ExperimentError: methods and options do not fit together.
        ModelError: a model does not exist, or does not accept these images.
    """
    module, networks, _ = _untrained(config, num_classes)
    return module, [] if config.rows_from is not None else networks


def _untrained(config: TrainConfig, num_classes: int) -> tuple[DistillationModule, list[nn.Module], list[TapReader]]:
    """Return a job's distillation module, the teacher networks that methods are built for, and the networks' readers."""
    _, student = build_student(config, Group(), num_classes)
    networks, methods = list[nn.Module](), methods_with_teacher(config)
    if methods and (config.rows_from is None or reads_features(methods)):
        networks = untrained_networks(config, num_classes)
    labels_M = torch.arange(num_classes)  # pretend a small training split, which keeps buffers with a row per sample small
    module, readers = build_distillation_module(config, Group(), student, networks, num_classes, labels_M)
    return module, networks, readers
