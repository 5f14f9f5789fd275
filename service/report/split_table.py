"""What `distill split` shows: what the parts of a model cost, and where to cut it for several devices."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from trainables.distributed.pipeline.plan import Block, Devices, Line, Plan, Planner

if TYPE_CHECKING:
    from service.config.experiment import Experiment

MIB = 2**20
MESSAGE_LATENCY_S = 20e-6


def split_parts(experiment: Experiment, num_classes: int, num_stages: int, link_gb_per_s: float) -> Iterator[Table | str]:
    """Time the student's parts on this machine, plan the cuts, and say what the plan expects.

    A teacher's network runs whole beside the last stage.

    Raises:
        ModelError: the student cannot be cut into so many stages.
    """
    import torch

    from trainables.device.model_input import autocast
    from trainables.distributed.pipeline.block_costs import forward_line, measure_blocks
    from trainables.distributed.pipeline.graph import cut_points
    from trainables.models.registry import build_model

    data = experiment.data
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    build = {"num_classes": num_classes, "image_size": data.image_size, "seed": experiment.seed}
    model = build_model(experiment.student.model, **build)
    batch = data.global_batch_size
    sizes = sorted({max(1, batch // 8), max(2, batch // 2)})
    timing = {"image_size": data.image_size, "sizes": sizes, "device": device}
    in_precision = autocast(experiment.precision, device)
    points = cut_points(model, data.image_size)
    if len(points) < num_stages - 1:
        raise_too_few(experiment.student.model, len(points), num_stages)
    blocks = measure_blocks(model, points, autocast=in_precision, **timing)
    teacher = Line(0.0, 0.0)
    if experiment.teacher is not None:
        teacher = forward_line(build_model(experiment.teacher.model, **build), autocast=in_precision, **timing)
    yield blocks_table(experiment.student.model, blocks, max(sizes), str(device))
    devices = Devices(num_stages, latency_s=MESSAGE_LATENCY_S, bytes_per_s=link_gb_per_s * 1e9)
    for schedule in ("1f1b", "gpipe"):
        plan = Planner(blocks, devices, schedule, last_stage_s=teacher).plan(batch)
        alone = Planner(blocks, Devices(1), schedule, last_stage_s=teacher).expect([0], batch, 1)
        yield plan_table(plan, schedule, batch)
        yield (
            f"{1e3 * plan.step_s:.1f} ms a step of {batch} images expected, {1e3 * alone.step_s:.1f} on one device;"
            f" the stages wait {100 * plan.bubble:.0f} % of it"
        )


def raise_too_few(name: str, num_points: int, num_stages: int) -> None:
    """Refuse a model with fewer cut points than stages need."""
    from trainables.errors import ModelError

    raise ModelError(
        f"{name} can be cut at {num_points} points, and {num_stages} stages need {num_stages - 1}: give fewer --stages"
    )


def blocks_table(name: str, blocks: Sequence[Block], num_images: int, device: str) -> Table:
    """The parts between neighbouring cut points."""
    table = Table(title=f"{name} in the parts that it can be cut into, {num_images} images on {device}", title_justify="left")
    table.add_column("begins at")
    for column in ("forward ms", "backward ms", "parameters MiB", "stored MiB", "sent MiB"):
        table.add_column(column, justify="right")
    for block in blocks:
        table.add_row(
            block.begins_at or "(images)",
            f"{1e3 * block.forward.seconds(num_images):.2f}",
            f"{1e3 * block.backward.seconds(num_images):.2f}",
            f"{block.parameter_bytes / MIB:.1f}",
            f"{num_images * block.activation_bytes / MIB:.1f}",
            f"{num_images * block.output_bytes / MIB:.2f}",
        )
    return table


def plan_table(plan: Plan, schedule: str, batch: int) -> Table:
    """The stages of a plan."""
    size = -(-batch // plan.num_micro_batches)
    table = Table(title=f"{schedule}: {plan.num_micro_batches} micro-batches of {size}", title_justify="left")
    table.add_column("stage", justify="right")
    table.add_column("begins at")
    for column in ("forward ms", "backward ms", "memory MiB"):
        table.add_column(column, justify="right")
    for index, stage in enumerate(plan.stages):
        table.add_row(
            str(index),
            stage.begins_at or "(images)",
            f"{1e3 * stage.forward_s:.2f}",
            f"{1e3 * stage.backward_s:.2f}",
            f"{stage.memory_bytes / MIB:.0f}",
        )
    return table
