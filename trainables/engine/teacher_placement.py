"""Where a teacher's network is: whole on each rank that runs it, or sharded over them (`teacher.placement`)."""

import logging

import torch
from torch import nn

from trainables.config import TrainConfig
from trainables.device.memory import memory_bytes, parameter_bytes
from trainables.distributed.group import Group
from trainables.engine.modules import methods_with_teacher
from trainables.engine.optim import parameter_copies
from trainables.methods.select import needs_whole_teacher
from trainables.teachers.build import to_device
from trainables.teachers.network import TeacherNetwork

log = logging.getLogger("raydistill")

MOST_WHOLE = 0.5
"""Of a device's memory, for a whole teacher, the student's parameters, gradients and optimizer state; activations need more."""


def is_sharded(config: TrainConfig, num_replicas: int, device: torch.device, student: nn.Module, teacher: nn.Module) -> bool:
    """What `teacher.placement` says or, by default, whether the teacher is too large for this device.

    `student` is the whole one, also where the device has a stage of it.
    """
    assert config.teacher is not None
    if num_replicas == 1 or config.teacher.placement == "whole":
        return False
    if config.teacher.placement == "sharded":
        return True
    if config.train.compile or any(map(needs_whole_teacher, methods_with_teacher(config))):
        return False
    student_bytes = parameter_copies(config.optim) * parameter_bytes(student) / config.scale.pipeline_stages
    return parameter_bytes(teacher) + student_bytes > MOST_WHOLE * memory_bytes(device)


def place(teacher: TeacherNetwork, config: TrainConfig, group: Group, *, sharded: bool) -> None:
    """Move a teacher that is on the CPU, in the job's dtype, to this rank's device; every rank of the group calls it."""
    if not sharded:
        to_device(teacher.model, config, group)
        return
    from trainables.teachers.sharded import shard  # torch's FSDP takes a second

    shard(teacher.model, group, config.data.image_size)
    teacher.is_collective = True
    log.info("%s: the teacher is sharded over %d workers", config.stage, group.world_size)
