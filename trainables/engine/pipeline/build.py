"""Cut a job's student into pipeline stages: where, and what of it and of its methods a rank keeps."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence

import torch
from torch import nn

from trainables.config import TrainConfig
from trainables.device.model_input import autocast
from trainables.distributed.group import gather_objects
from trainables.distributed.pipeline.block_costs import measure_blocks
from trainables.distributed.pipeline.graph import CutPoint, StageModule, cut_points, split
from trainables.distributed.pipeline.layout import Layout
from trainables.distributed.pipeline.plan import Devices, Planner
from trainables.errors import DistillError, ExperimentError, ModelError
from trainables.methods.distillation_module import DistillationModule
from trainables.models.reused_classifier import ReusedClassifier
from trainables.rules import replica_batch

log = logging.getLogger("raydistill")


def possible_cuts(config: TrainConfig, module: DistillationModule) -> list[CutPoint]:
    """Where the student may be cut: before all that its methods read. With `scale.cut` those cuts.

    Raises:
        ExperimentError, ModelError: it cannot be cut so, or has methods that cannot be trained in stages; one line.
    """
    stages, model = config.scale.pipeline_stages, config.model
    for key, method in module.methods_by_name.items():
        if method.init_epochs or method.optimizers:
            what = "an init stage" if method.init_epochs else "optimizers of its own"
            raise ExperimentError(
                f"distill.method: {key} has {what}, which scale.pipeline_stages {stages} does not go with: take another method,"
                " or write scale.pipeline_stages 1"
            )
    if isinstance(module.student, ReusedClassifier):
        raise ExperimentError(
            f"scale.pipeline_stages {stages}: the student predicts with its teacher's classifier, and cannot be cut: take"
            " another distill.method, or write scale.pipeline_stages 1"
        )
    points = cut_points(module.student, config.data.image_size, module.tapped_modules)
    if config.scale.cut is not None:
        return [_named(cut, points, module, model) for cut in config.scale.cut]
    if len(points) < stages - 1:
        most = f"at most {len(points) + 1}" if points else "1"
        read = f", before {', '.join(sorted(module.tapped_modules))}, which methods read" if module.tapped_modules else ""
        raise ModelError(f"model {model} can be cut at {len(points)} points{read}: write scale.pipeline_stages {most}")
    return points


def _named(cut: str, points: Sequence[CutPoint], module: DistillationModule, model: str) -> CutPoint:
    found = next((point for point in points if cut == point.module or cut in point.aliases), None)
    if found is not None:
        return found
    names = ", ".join(point.module for point in points) or "none"
    read = f"; methods read {', '.join(sorted(module.tapped_modules))}" if module.tapped_modules else ""
    raise ModelError(f"scale.cut: model {model} cannot be cut before {cut}: choose among {names}{read}")


def choose_cuts(config: TrainConfig, points: Sequence[CutPoint], student: nn.Module, device: torch.device) -> tuple[str, ...]:
    """The modules with which the second and later stages begin: those of `scale.cut`, or the fastest by timing on `device`."""
    scale = config.scale
    if scale.cut is not None:
        return tuple(point.module for point in points)
    batch = replica_batch(config)
    size = max(1, batch // scale.micro_batches)
    blocks = measure_blocks(
        student,
        points,
        image_size=config.data.image_size,
        sizes=[size, 2 * size],
        device=device,
        autocast=autocast(config.precision, device),
    )
    devices = Devices(scale.pipeline_stages, num_replicas=scale.num_replicas)
    return Planner(blocks, devices, scale.schedule).plan(batch).cuts


def cut_student(config: TrainConfig, layout: Layout, module: DistillationModule) -> StageModule:
    """This rank's stage of `module`'s student, which is on the CPU, on its device; every rank calls it.

    The memory of the others is freed.

    Raises:
        ExperimentError, ModelError: see `possible_cuts`; on every rank.
    """
    student, decides = module.student, layout.is_last and layout.replicas.is_main  # the last stage knows what methods read
    chosen = gather_objects(_cuts_or_problem(config, layout, module) if decides else None, layout.stages)[-1]
    cuts = gather_objects(chosen, layout.replicas)[0]
    if isinstance(cuts, DistillError):
        raise cuts
    log.info("%s: %s in %d stages, cut before %s", config.stage, config.model, len(cuts) + 1, ", ".join(cuts))
    stage = split(student, cuts)[layout.stages.rank]
    _free(student, {id(tensor) for tensor in (*stage.parameters(), *stage.buffers())})
    return stage.to(layout.stages.device)


def _cuts_or_problem(config: TrainConfig, layout: Layout, module: DistillationModule) -> tuple[str, ...] | DistillError:
    try:
        return choose_cuts(config, possible_cuts(config, module), module.student, layout.stages.device)
    except DistillError as error:
        return error


def _free(model: nn.Module, kept: Collection[int]) -> None:
    """Drop the memory of all parameters and buffers but those with these ids: methods and taps may refer to the modules."""
    for tensor in (*model.parameters(), *model.buffers()):
        if id(tensor) not in kept:
            tensor.data = tensor.data.new_empty(0)
