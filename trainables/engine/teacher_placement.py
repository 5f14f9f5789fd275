"""Place a teacher's network: whole on each rank that runs it, or sharded over them (`teacher.placement`)."""

import logging
from collections.abc import Sequence

import torch
from torch import nn

from trainables.config import TrainConfig
from trainables.device.memory import memory_bytes, parameter_bytes
from trainables.device.tensor_format import AUTOCAST, teacher_precision
from trainables.distributed.group import Group
from trainables.engine.modules import methods_with_teacher
from trainables.engine.optim import parameter_copies
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

    The weights of a whole teacher are rounded once where autocast would round them in each pass.
    """
    if not sharded:
        requires = [method.requires for method in methods_with_teacher(config)]
        may_change = not any(each.teacher_model or each.reuses_classifier for each in requires)  # these use its modules
        for each, network in zip(config.all_teachers, teacher.networks, strict=True):
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


def round_weights(network: nn.Module, dtype: torch.dtype) -> None:
    """Give the layers that autocast runs in `dtype` their weights in it: the same bits in fewer passes, under autocast alone."""
    for module in network.modules():
        if type(module) in (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear):
            module.to(dtype)
