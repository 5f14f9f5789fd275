"""What `distill split` shows: the pipeline stages of a student, what they cost, and whether they help. Imports torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from rich.table import Table
from torch import nn

from service.config.experiment import Experiment
from service.config.method_rules import distills
from service.report.text_table import text_table
from service.runs.dry_run import num_classes_of
from trainables.device.model_input import autocast
from trainables.distributed.pipeline.block_costs import Conditions
from trainables.distributed.pipeline.costs import Devices, Link, Plan, usual_link
from trainables.distributed.pipeline.graph import cut_points
from trainables.distributed.pipeline.plan import Planner
from trainables.distributed.pipeline.plan_cut import block_costs, cache_folder, sizes_to_measure, starts_of, teacher_costs
from trainables.models.registry import construct
from trainables.teachers.ensemble import TeacherEnsemble

MIB = 2**20
SCHEDULE = "1f1b"
PLACEMENTS = {
    "last": "whole, on the last stage's device",
    "worker": "whole, on each device for its share of the batch",
    "pipeline": "cut too",
}


def cut_point_table(experiment: Experiment) -> Table:
    """All cut points of the student.

    Raises:
        ModelError: it cannot be traced.
    """
    points = cut_points(_student(experiment), experiment.data.image_size)
    size = "×".join(["3", *[str(experiment.data.image_size)] * 2])
    table = text_table(
        f"{experiment.student.model} can be cut at {len(points)} points (images {size})",
        ("a stage can begin at", "or at", "tensor of an image", "MiB"),
        left=("a stage can begin at", "or at"),
    )
    for point in points:
        shape = "×".join(map(str, point.shape))
        num_bytes = math.prod(point.shape) * point.dtype.itemsize
        table.add_row(point.module, ", ".join(point.aliases), shape, f"{num_bytes / MIB:.3f}")
    return table


def split_parts(
    experiment: Experiment, num_stages: int, cuts: Sequence[str] | None, link_gb_per_s: float | None
) -> Iterator[Table | str]:
    """Time the student's parts and the teacher on this machine, plan the stages, and say what the plan expects.

    Raises:
        ModelError: the student cannot be cut so, or nothing fits the device's memory.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    image_size = experiment.data.image_size
    layout = torch.channels_last if experiment.train.channels_last else torch.contiguous_format
    conditions = Conditions(image_size, device, experiment.precision, autocast(experiment.precision, device), layout)
    replicas = max(1, experiment.scale.num_workers // num_stages)
    batch = -(-experiment.data.global_batch_size // (replicas * experiment.optim.accumulate))
    student = _student(experiment)
    points = cut_points(student, image_size)
    starts = None if cuts is None else starts_of(points, cuts, num_stages)
    sizes, cache = sizes_to_measure(batch, num_stages, None), cache_folder()
    blocks = block_costs(student, points, conditions, sizes, cache=cache)
    network = _teacher(experiment)
    teacher = [] if network is None else teacher_costs(network, conditions, sizes, cache=cache)
    link = usual_link(device.type) if link_gb_per_s is None else Link(bytes_per_s=1e9 * link_gb_per_s)
    memory = math.inf if device.type == "cpu" else float(torch.cuda.get_device_properties(device).total_memory)
    adam = experiment.optim.name == "adamw"
    devices = Devices(num_stages, replicas, link, memory_bytes=memory, parameter_copies=4 if adam else 3)
    plan = Planner(blocks, devices, SCHEDULE, teacher).plan(batch, starts)

    def whole(num_replicas: int, num_samples: int) -> Plan:
        alone = Devices(1, num_replicas, link, parameter_copies=devices.parameter_copies)
        return Planner(blocks, alone, SCHEDULE, teacher).expect((0,), num_samples, 1)

    yield plan_table(experiment, plan, batch, device)
    yield from _verdict(plan, whole(replicas, batch), whole(replicas * num_stages, -(-batch // num_stages)), memory)


def plan_table(experiment: Experiment, plan: Plan, batch: int, device: torch.device) -> Table:
    """A row for each stage. Times and bytes are of a micro-batch."""
    title = f"{experiment.student.model} in {len(plan.stages)} stages, {batch} images in {plan.num_micro_batches} micro-batches"
    taught = plan.placement != "none"
    columns = ["stage", "begins at", "forward ms", "backward ms", "parameters MiB", "memory MiB", "sent MiB"]
    table = text_table(f"{title}, {device}", [*columns, *(["teacher ms"] if taught else [])], left=("begins at",))
    for index, stage in enumerate(plan.stages):
        table.add_row(
            str(index),
            stage.begins_at or "(images)",
            f"{1e3 * stage.forward_s:.2f}",
            f"{1e3 * stage.backward_s:.2f}",
            f"{stage.parameter_bytes / MIB:.2f}",
            f"{stage.memory_bytes / MIB:.0f}",
            f"{stage.sent_bytes / MIB:.2f}",
            *([f"{1e3 * stage.teacher_s:.2f}"] if taught else []),
        )
    return table


def _verdict(plan: Plan, one: Plan, ddp: Plan, memory_bytes: float) -> Iterator[str]:
    num_stages, number = len(plan.stages), plan.num_micro_batches
    formula = (num_stages - 1) / (number + num_stages - 1)
    yield f"write scale.cut: [{', '.join(plan.cuts)}]; schedule {plan.schedule}"
    if plan.placement in PLACEMENTS:
        yield f"teacher: {PLACEMENTS[plan.placement]}" + (f", at {', '.join(plan.teacher_cuts)}" if plan.teacher_cuts else "")
    yield f"bubble {100 * plan.bubble:.0f} % of a step; {100 * formula:.0f} % for equal stages and sends that take no time"
    yield (
        f"predicted step {1e3 * plan.step_s:.1f} ms; one device {1e3 * one.step_s:.1f} ms ({one.step_s / plan.step_s:.2f} ×);"
        f" DDP of {num_stages} devices {1e3 * ddp.step_s:.1f} ms ({ddp.step_s / plan.step_s:.2f} ×)"
    )
    if ddp.stages[0].memory_bytes > memory_bytes:
        yield f"the whole model needs {ddp.stages[0].memory_bytes / 2**30:.1f} GiB: it fits no device"
    elif ddp.step_s <= plan.step_s:
        yield f"it does not help: DDP of {num_stages} devices is faster, and the whole model fits each of them"


def _student(experiment: Experiment) -> nn.Module:
    return _model(experiment, experiment.student.model)


def _teacher(experiment: Experiment) -> nn.Module | None:
    """The network that runs in each step; None: there is none, or its logits come from elsewhere."""
    teacher = experiment.teacher
    if teacher is None or not distills(experiment) or teacher.cache is not None or teacher.service:
        return None
    models = [_model(experiment, name) for name in (teacher.model, *(other.model for other in teacher.others))]
    return TeacherEnsemble(models) if teacher.others else models[0]


def _model(experiment: Experiment, name: str) -> nn.Module:
    data = experiment.data
    num_classes = num_classes_of(data.path, data.synthetic_classes)
    model = construct(name, num_classes=num_classes, image_size=data.image_size, seed=experiment.seed)
    return model.double() if experiment.precision == "fp64" else model
