"""What `distill split` shows: the pipeline stages of a student, what they cost, and whether they help. Imports torch."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from rich.table import Table
from torch import nn

from service.config.schema import Experiment
from service.report.text_table import text_table
from service.runs.dry_run import num_classes_of
from trainables.config import TrainConfig
from trainables.device.memory import memory_bytes
from trainables.device.model_input import tensor_format
from trainables.distributed.group import Group
from trainables.distributed.pipeline.costs import Link, Plan, usual_link
from trainables.engine.dry_run import untrained_modules
from trainables.engine.pipeline.build import possible_cuts
from trainables.engine.pipeline.planning import PlannedModels, measure, plan_stages, planned_batch, planner_of, sizes_of
from trainables.engine.teacher_placement import is_sharded
from trainables.methods.distillation_module import DistillationModule

MIB = 2**20


def student_in_stages(experiment: Experiment, num_stages: int, cuts: Sequence[str] | None) -> TrainConfig:
    """The job of the student's stage, of as many workers as the experiment has or the next number that can be divided."""
    config = experiment.stage("student", Path("/"), {}, "-")
    num_workers = -(-experiment.scale.num_workers // num_stages) * num_stages
    scale = {"num_workers": num_workers, "pipeline_stages": num_stages, "cut": cuts}
    return config.model_copy(update={"scale": config.scale.model_copy(update=scale)})


def cut_point_table(config: TrainConfig) -> Table:
    """All cut points of the student, before what its methods read.

    Raises:
        ExperimentError: a method cannot be trained in stages.
        ModelError: the student cannot be cut into so many.
    """
    scale = config.scale.model_copy(update={"cut": None})
    module, _ = _modules(config)
    points = possible_cuts(config.model_copy(update={"scale": scale}), module)
    size = "×".join(["3", *[str(config.data.image_size)] * 2])
    table = text_table(
        f"{config.model} can be cut at {len(points)} points (images {size})",
        ("a stage can begin at", "or at", "tensor of an image", "MiB"),
        left=("a stage can begin at", "or at"),
    )
    for point in points:
        shape = "×".join(map(str, point.shape))
        num_bytes = math.prod(point.shape) * point.dtype.itemsize
        table.add_row(point.module, ", ".join(point.aliases), shape, f"{num_bytes / MIB:.3f}")
    return table


def split_parts(config: TrainConfig, link_gb_per_s: float | None) -> Iterator[Table | str]:
    """Time the student's parts and the teacher on this machine, plan the stages, and say what the plan expects.

    Raises:
        ExperimentError: a method cannot be trained in stages.
        ModelError: the student cannot be cut so, or nothing fits the device's memory.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    scale = config.scale
    if device.type == "cpu":
        torch.set_num_threads(scale.cpus_per_worker)  # as a worker has them
    module, network = _modules(config)
    sharded = network is not None and is_sharded(config, scale.num_replicas, device, module.student, network)
    link = usual_link(device.type) if link_gb_per_s is None else Link(bytes_per_s=1e9 * link_gb_per_s)
    models = PlannedModels(module.student, network, sharded)
    points, alone = possible_cuts(config, module), Group(device=device)
    costs = measure(config, points, models, sizes_of(config), alone, alone)
    planner = planner_of(config, device, link, costs, teacher_is_sharded=sharded)
    plan, batch = plan_stages(config, points, planner), planned_batch(config)

    def whole(num_replicas: int, num_samples: int) -> Plan:
        devices = replace(planner.devices, num_stages=1, num_replicas=num_replicas)
        share = 1 / num_replicas if sharded else 1.0
        return replace(planner, devices=devices, teacher_share=share).expect((0,), num_samples, 1)

    yield plan_table(config.model, plan, batch, device)
    if network is not None:
        how = f"sharded over {scale.num_replicas} replicas" if sharded else "whole"
        yield f"teacher: {how}, on the last stage's device"
    ddp = whole(scale.num_workers, -(-batch // scale.num_stages))
    yield from _verdict(plan, whole(scale.num_replicas, batch), ddp, memory_bytes(device))


def plan_table(model: str, plan: Plan, batch: int, device: torch.device) -> Table:
    """A row for each stage. Times and bytes are of a micro-batch."""
    title = f"{model} in {len(plan.stages)} stages, {batch} images in {plan.num_micro_batches} micro-batches"
    taught = any(stage.teacher_s for stage in plan.stages)
    columns = ["stage", "begins at", "forward ms", "backward ms", "parameters MiB", "memory MiB", "sent MiB"]
    table = text_table(
        f"{title}, {device}",
        [*columns, *(["teacher ms"] if taught else [])],
        left=("begins at",),
        optional=("sent MiB", "parameters MiB"),
    )
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
    yield f"bubble {100 * plan.bubble:.0f} % of a step; {100 * formula:.0f} % for equal stages and sends that take no time"
    yield (
        f"predicted step {1e3 * plan.step_s:.1f} ms; one device {1e3 * one.step_s:.1f} ms ({one.step_s / plan.step_s:.2f} ×);"
        f" DDP of {num_stages} devices {1e3 * ddp.step_s:.1f} ms ({ddp.step_s / plan.step_s:.2f} ×)"
    )
    if ddp.stages[0].memory_bytes > memory_bytes:
        yield f"the whole model needs {ddp.stages[0].memory_bytes / 2**30:.1f} GiB: it fits no device"
    elif ddp.step_s <= plan.step_s:
        yield f"it does not help: DDP of {num_stages} devices is faster, and the whole model fits each of them"


def _modules(config: TrainConfig) -> tuple[DistillationModule, nn.Module | None]:
    """Of the student, and the teacher's network where one runs in each step, in the job's dtype."""
    module, network = untrained_modules(config, num_classes_of(config.data.path, config.data.synthetic_classes))
    dtype, _ = tensor_format(config)
    return module.to(dtype), None if network is None else network.to(dtype)
