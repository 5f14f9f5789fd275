"""The output of `distill split` (a model's blocks, their costs, and where to cut) and `distill taps`. Imports torch."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas as pd
import torch

from service.config.schema import Experiment
from service.report.table import Table
from service.report.tables import table_of
from service.runs.dry_run import num_classes_of
from trainables.config import TrainConfig
from trainables.device.tensor_format import tensor_format
from trainables.distributed.pipeline.block_costs import Block
from trainables.distributed.pipeline.choose_cut import choose_cut
from trainables.engine.dry_run import untrained_modules
from trainables.engine.pipeline.build import stage_costs
from trainables.engine.teacher_placement import is_sharded
from trainables.models.registry import check_forward, construct
from trainables.models.tap_names import list_taps
from trainables.rules import num_micro_batches, pipeline_micro_batches, replica_batch

MIB = 2**20


def student_in_stages(experiment: Experiment, num_stages: int) -> TrainConfig:
    """Return the job of the student's stage, with the number of workers rounded up to a multiple of `num_stages`.

    `scale.cut` is cleared, since it is what `distill split` looks for.
    """
    config = experiment.stage("student", Path("/"), {}, "-")
    num_workers = -(-experiment.scale.num_workers // num_stages) * num_stages
    scale = {"num_workers": num_workers, "pipeline_stages": num_stages, "cut": None}
    return config.model_copy(update={"scale": config.scale.model_copy(update=scale)})


def split_parts(config: TrainConfig) -> Iterator[Table | str]:
    """Time the student's blocks and the teacher on this machine, and say where to cut.

    Raises:
        ExperimentError: a method does not support pipeline stages.
        ModelError: the student cannot be cut this way, or no cut fits the device's memory.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    scale, dtype = config.scale, tensor_format(config)[0]
    if device.type == "cpu":
        torch.set_num_threads(scale.cpus_per_worker)  # as in a worker
    module, networks = untrained_modules(config, num_classes_of(config.data))
    networks = [each.to(dtype) for each in networks]
    module.to(dtype)
    sharded = bool(networks) and is_sharded(config, scale.num_replicas, device, module.student, networks)
    costs = stage_costs(config, module, networks, device, teacher_is_sharded=sharded)
    starts, number = choose_cut(costs), pipeline_micro_batches(config)
    num_images = -(-replica_batch(config) // num_micro_batches(config))
    yield block_table(
        f"{config.model} in {len(starts)} stages, {number} micro-batches of {num_images} images, {device}", costs.blocks, starts
    )
    if networks:
        how = f"sharded over {scale.num_replicas} replicas" if sharded else "whole"
        yield f"teacher: {1e3 * costs.teacher_s:.2f} ms per micro-batch, {how}, on the last stage's device"
    yield f"write scale.cut: [{', '.join(costs.blocks[start].begins_at for start in starts[1:])}]; schedule {scale.schedule}"
    bubble = (len(starts) - 1) / (number + len(starts) - 1)
    yield f"bubble (S - 1)/(M + S - 1) = {100 * bubble:.0f} % of a step, for {len(starts)} equal stages, {number} micro-batches"


def block_table(title: str, blocks: Sequence[Block], starts: Sequence[int]) -> Table:
    """Tabulate the blocks. Times and activations are per micro-batch."""
    rows = [
        {
            "stage": sum(start <= index for start in starts) - 1,
            "block begins at": block.begins_at or "(images)",
            "parameters MiB": block.parameter_bytes / MIB,
            "forward ms": 1e3 * block.forward_s,
            "backward ms": 1e3 * block.backward_s,
            "activations MiB": block.activation_bytes / MIB,
        }
        for index, block in enumerate(blocks)
    ]
    return table_of(pd.DataFrame(rows), title)


def points_table(model: str, image_size: int, num_classes: int, show_all: bool) -> Table:
    """Tabulate the taps: name, aliases, and shape per sample; with `show_all`, for all modules.

    Raises ModelError: no such model, or it does not accept images of this size.
    """
    built = construct(model, num_classes=num_classes, image_size=image_size, seed=0)
    check_forward(built, image_size, num_classes, name=model)
    points = list_taps(built, image_size, every=show_all)
    rows = [[point.name, ", ".join(point.aliases), "×".join(map(str, point.shape))] for point in points]
    title = f"taps of {model} at {image_size}×{image_size}"
    return Table(title, ["name", "aliases", "shape per sample"], rows, left=["name", "aliases"])
