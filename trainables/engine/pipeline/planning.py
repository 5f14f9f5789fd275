"""Plan a job's pipeline stages: its models are timed on its devices, and the cut with the shortest predicted step is taken."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from trainables.config import TrainConfig
from trainables.device.memory import memory_bytes
from trainables.device.model_input import autocast, tensor_format
from trainables.distributed.group import Group, from_each
from trainables.distributed.pipeline.block_costs import Conditions
from trainables.distributed.pipeline.costs import Block, Devices, Link, Plan
from trainables.distributed.pipeline.cut_points import CutPoint
from trainables.distributed.pipeline.plan import Planner
from trainables.distributed.pipeline.plan_cut import block_costs, cache_folder, sizes_to_measure, starts_of, teacher_costs
from trainables.engine.optim import parameter_copies
from trainables.rules import replica_batch


class PlannedModels(NamedTuple):
    """Of a job in stages."""

    student: nn.Module
    teacher: nn.Module | None
    """A network that runs on the last stage."""
    teacher_is_sharded: bool = False
    """Over the last stages of all replicas."""


class Costs(NamedTuple):
    """Of a job's models, whole on each device."""

    student: list[Block]
    teacher: list[Block]


def planned_batch(config: TrainConfig) -> int:
    """Samples that flow through the pipeline in one run of its schedule."""
    return -(-replica_batch(config) // config.optim.accumulate)


def sizes_of(config: TrainConfig) -> list[int]:
    """The micro-batches to time for a job's number of stages."""
    number = None if config.scale.micro_batches == "auto" else config.scale.micro_batches
    return sizes_to_measure(planned_batch(config), config.scale.num_stages, number)


def measure(
    config: TrainConfig,
    points: Sequence[CutPoint],
    models: PlannedModels,
    sizes: Sequence[int],
    group: Group,
    with_teacher: Group,
) -> Costs:
    """Time the parts between `points` on all ranks at once, and the teacher on those that have one, which are this rank's
    `with_teacher`; or read what was measured before. Every rank of `group` calls it.

    Raises ModelError: one of them does not fit a device's memory; on every rank.
    """
    cache, device = cache_folder(), group.device
    in_precision, layout = autocast(config.precision, device), tensor_format(config)[1]
    conditions = Conditions(config.data.image_size, device, config.precision, in_precision, layout)
    student = block_costs(models.student, points, conditions, sizes, group, cache=cache)

    def teacher() -> list[Block]:
        return [] if models.teacher is None else teacher_costs(models.teacher, conditions, sizes, with_teacher, cache=cache)

    return Costs(student, next(filter(None, from_each(teacher, group)), []))


def planner_of(config: TrainConfig, device: torch.device, link: Link, costs: Costs, *, teacher_is_sharded: bool) -> Planner:
    """Plans a job's number of stages."""
    scale = config.scale
    devices = Devices(
        scale.num_stages,
        scale.num_replicas,
        link,
        all_reduce_bytes_per_s=link.bytes_per_s,
        memory_bytes=memory_bytes(device),
        parameter_copies=parameter_copies(config.optim),
    )
    share = 1 / scale.num_replicas if teacher_is_sharded else 1.0
    return Planner(costs.student, devices, scale.schedule, costs.teacher, share)


def plan_stages(config: TrainConfig, points: Sequence[CutPoint], planner: Planner) -> Plan:
    """What `scale` leaves open. Raises ModelError: nothing fits the device's memory."""
    scale = config.scale
    number = None if scale.micro_batches == "auto" else scale.micro_batches
    starts = None if scale.cut is None else starts_of(points, scale.cut, scale.num_stages)
    return planner.plan(planned_batch(config), starts, number)
