"""Place a teacher's network: whole on each rank that runs it, or sharded over them (`teacher.placement`)."""

import logging
from collections.abc import Sequence

import torch
from torch import nn

from trainables.config import TrainConfig, WeightedConfig
from trainables.device.memory import memory_bytes, parameter_bytes
from trainables.device.tensor_format import AUTOCAST, teacher_precision
from trainables.distributed.group import Group
from trainables.engine.modules import methods_with_teacher
from trainables.engine.optim import parameter_copies
from trainables.teachers.frozen import fold_batch_norms, round_weights
from trainables.teachers.network import TeacherNetwork, move

log = logging.getLogger("raydistill")

MAX_REPLICATED_FRACTION = 0.5
"""The fraction of a device's memory that a whole teacher and the student's parameters, gradients and optimizer may fill."""


def is_sharded(
    config: TrainConfig, num_replicas: int, device: torch.device, student: nn.Module, teachers: Sequence[nn.Module]
) -> bool:
    """Return whether to shard the teachers: by `teacher.placement`, or by default if they are too large for this device.

    `student` is the whole student, even if the device gets only a stage of it.
    """
    placement = config.teacher.placement if config.teacher is not None else "auto"
    if num_replicas == 1 or placement == "whole":
        return False
    if placement == "sharded":
        return True
    if config.train.compile or any(method.requires.teacher_model for method in methods_with_teacher(config)):
        return False
    student_bytes = parameter_copies(config.optim) * parameter_bytes(student) / config.scale.pipeline_stages
    return sum(map(parameter_bytes, teachers)) + student_bytes > MAX_REPLICATED_FRACTION * memory_bytes(device)


def place(teacher: TeacherNetwork, config: TrainConfig, group: Group, *, sharded: bool) -> None:
    """Move a teacher from the CPU to this rank's device, in the job's dtype. Every rank of the group must call this.

    A whole teacher is optimized for inference, see `teachers.frozen`.
    """
    if not sharded:
        requires = [method.requires for method in methods_with_teacher(config)]
        may_change = not any(each.teacher_model or each.reuses_classifier for each in requires)  # these use its modules
        for each, network, reader in zip(config.all_teachers, teacher.networks, teacher.readers, strict=True):
            if may_change and folds_batch_norms(each, config):
                fold_batch_norms(network, reader.modules)
            move(network, config, group.device)
            if may_change and (dtype := AUTOCAST.get(teacher_precision(each, config))) is not None:
                round_weights(network, dtype)
        return
    from trainables.teachers.sharded import shard  # importing torch's FSDP takes a second

    for network in teacher.networks:
        shard(network, group, config.data.image_size)
    teacher.is_collective = True
    if config.scale.pipeline_stages == 1:
        log.info("%s: the teacher is sharded over %d workers", config.stage, group.world_size)


def folds_batch_norms(teacher: WeightedConfig, config: TrainConfig) -> bool:
    """Return `teacher.fold_batch_norms`; by default True in half precision, which rounds more than folding does."""
    return teacher_precision(teacher, config) in AUTOCAST if teacher.fold_batch_norms is None else teacher.fold_batch_norms
