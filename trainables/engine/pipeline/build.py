"""Cut a job's student into pipeline stages."""

import logging
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn

from trainables.config import TrainConfig
from trainables.device.memory import memory_bytes
from trainables.device.tensor_format import autocast, tensor_format
from trainables.distributed.group import broadcast_result
from trainables.distributed.pipeline.block_costs import Block, measure_blocks
from trainables.distributed.pipeline.choose_cut import StageCosts, choose_cut
from trainables.distributed.pipeline.graph import become_stage, split
from trainables.distributed.pipeline.layout import Layout
from trainables.engine import checkpoint
from trainables.engine.optim import parameter_copies
from trainables.errors import ModelError
from trainables.methods.distillation_module import DistillationModule
from trainables.models.cut_points import cut_points
from trainables.models.model_input import trained_model_input
from trainables.rules import num_micro_batches, pipeline_micro_batches, replica_batch

log = logging.getLogger("raydistill")


def possible_cuts(config: TrainConfig, module: DistillationModule) -> list[str]:
    """Return the points where the student can be cut, all before the taps that methods read; or `scale.cut`, if set.

    Raises ModelError: the student cannot be cut like that.
    """
    stages, model, cuts = config.scale.pipeline_stages, config.model, config.scale.cut
    if (size := trained_model_input(config).image_size) != config.data.image_size:
        raise ModelError(
            f"scale.pipeline_stages: the fine-tuned {model} takes crops of {config.data.image_size} px resized to {size}: "
            f"set data.image_size to {size}, or scale.pipeline_stages to 1"
        )
    points = cut_points(module.student, config.data.image_size, module.tapped_modules)
    read = ", ".join(sorted(module.tapped_modules))
    if cuts is None:
        if len(points) < stages - 1:
            most, before = f"at most {len(points) + 1}" if points else "1", f", before {read}, which methods read" if read else ""
            raise ModelError(f"model {model} can be cut at {len(points)} points{before}: write scale.pipeline_stages {most}")
        return points
    if unknown := [cut for cut in cuts if cut not in points]:
        names, read = ", ".join(points) or "none", f"; methods read {read}" if read else ""
        raise ModelError(f"scale.cut: model {model} cannot be cut before {unknown[0]}: choose from {names}{read}")
    if any(points.index(first) >= points.index(then) for first, then in pairwise(cuts)):
        raise ModelError("scale.cut: list the modules in the order of the forward pass, each once")
    for begin, stage in zip(["the images", *cuts], split(module.student, cuts), strict=True):
        if not any(parameter.requires_grad for parameter in stage.parameters()):  # torch's optimizers refuse this
            raise ModelError(f"scale.cut: the stage that begins with {begin} has no parameters to train: cut elsewhere")
    return list(cuts)


def stage_costs(
    config: TrainConfig,
    module: DistillationModule,
    teachers: Sequence[nn.Module],
    device: torch.device,
    *,
    teacher_is_sharded: bool,
) -> StageCosts:
    """Time the blocks of `module`'s student, and the teachers, on this device.

    `teachers` are networks that run on the last stage, or are sharded over the last stages of all replicas.

    Raises ModelError: see `possible_cuts`, `measure_blocks`.
    """
    points = possible_cuts(config, module)
    size, (dtype, layout) = config.data.image_size, tensor_format(config)
    num_samples = -(-replica_batch(config) // num_micro_batches(config))
    images_BCHW = torch.rand(num_samples, 3, size, size, device=device, dtype=dtype).to(memory_format=layout)
    precision, teacher_blocks = autocast(config.precision, device), list[Block]()
    for teacher in teachers:
        teacher_blocks += measure_blocks(teacher, [], images_BCHW, precision, training=False)  # as a single block
    return StageCosts(
        measure_blocks(module.student, points, images_BCHW, precision),
        config.scale.pipeline_stages,
        pipeline_micro_batches(config),
        config.scale.schedule,
        parameter_copies(config.optim),
        memory_bytes(device),
        sum(block.forward_s for block in teacher_blocks),
        sum(block.parameter_bytes for block in teacher_blocks) / (config.scale.num_replicas if teacher_is_sharded else 1),
    )


def with_saved_cut(config: TrainConfig, path: Path) -> TrainConfig:
    """Set `scale.cut`, if absent, to the cut of a checkpoint with as many stages, so that a resume gives the same bits.

    Raises CheckpointError: the file is damaged.
    """
    saved = checkpoint.read_metadata(path).get("pipeline") or {}
    if config.scale.cut is not None or saved.get("pipeline_stages") != config.scale.pipeline_stages or saved["cut"] is None:
        return config
    return _with_cut(config, saved["cut"])


def _with_cut(config: TrainConfig, cut: list[str]) -> TrainConfig:
    return config.model_copy(update={"scale": config.scale.model_copy(update={"cut": tuple(cut)})})


def cut_student(
    config: TrainConfig, layout: Layout, module: DistillationModule, teachers: Sequence[nn.Module], *, teacher_is_sharded: bool
) -> TrainConfig:
    """Reduce `module`'s student, on the CPU, to this rank's stage, and move that to the device. Return the config with its cut.

    Every rank must call this; those of the last stage have the methods and the teacher. Without `scale.cut`, the last stage of
    the first replica chooses the cut. Frees the memory of other stages.

    Raises ModelError: on every rank; see `possible_cuts`, `choose_cut`.
    """
    scale, device = config.scale, layout.pipeline.device

    def find_cut() -> list[str]:
        if scale.cut is not None:
            return possible_cuts(config, module)
        costs = stage_costs(config, module, teachers, device, teacher_is_sharded=teacher_is_sharded)
        return [costs.blocks[first].begins_at for first in choose_cut(costs)[1:]]

    cuts = broadcast_result(find_cut, layout.job, scale.pipeline_stages - 1)
    log.info("%s: %s in %d stages, cut before %s", config.stage, config.model, scale.pipeline_stages, ", ".join(cuts))
    log.info("%s: %d micro-batches, %s", config.stage, pipeline_micro_batches(config), scale.schedule)
    if teacher_is_sharded:  # logged here, as rank 0, which writes the log, may have no teacher
        log.info("%s: the teacher is sharded over the last stages of %d replicas", config.stage, scale.num_replicas)
    become_stage(module.student, cuts, layout.pipeline.rank)
    module.student.to(device)
    return _with_cut(config, cuts)
