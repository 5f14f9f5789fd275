"""What a plan is made from: the costs of the blocks, which are measured once and stored in a file, and cuts by name."""

import hashlib
import json
import logging
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainables.distributed.group import Group, from_each, from_rank
from trainables.distributed.pipeline.block_costs import Conditions, Measurement, measure_blocks
from trainables.distributed.pipeline.costs import Block, PassTime
from trainables.distributed.pipeline.cut_points import CutPoint, cut_points
from trainables.distributed.pipeline.stage_module import split
from trainables.distributed.pipeline.starts import Starts
from trainables.errors import ModelError
from trainables.rundir import write_json

log = logging.getLogger("raydistill")

MOST_SPREAD = 2.0
"""Times whose median is so many times the shortest are those of a busy machine: the next plan measures anew."""


def cache_folder() -> Path | None:
    """Where measured times are kept. None: the user has no home."""
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path.home() / ".cache") / "raydistill" / "block_costs"
    except RuntimeError:
        return None


def starts_of(points: Sequence[CutPoint], cuts: Sequence[str], num_stages: int) -> Starts:
    """The first blocks of the stages that begin with these modules.

    Raises ModelError: a name is no cut point, or they are not one fewer than stages, in the order of the forward.
    """
    starts = [0]
    for cut in cuts:
        found = next((index for index, point in enumerate(points, start=1) if cut in (point.module, *point.aliases)), None)
        if found is None:
            raise ModelError(f"the model cannot be cut before {cut}: choose among {', '.join(point.module for point in points)}")
        starts.append(found)
    if len(starts) != num_stages or any(first >= then for first, then in pairwise(starts)):
        raise ModelError(f"{num_stages} stages need {num_stages - 1} cuts in the order of the forward, not {', '.join(cuts)}")
    return tuple(starts)


def sizes_to_measure(num_samples: int, num_stages: int, num_micro_batches: int | None) -> list[int]:
    """Micro-batches of a replica's batch in 1, 2, 4 and 8 parts a stage; the one that is asked for; the whole batch."""
    sizes = {-(-num_samples // (num_stages * parts)) for parts in (1, 2, 4, 8)}
    requested = {-(-num_samples // num_micro_batches)} if num_micro_batches is not None else set()
    return sorted(sizes | requested | {num_samples})


def block_costs(
    model: nn.Module,
    points: Sequence[CutPoint],
    conditions: Conditions,
    sizes: Sequence[int],
    group: Group,
    *,
    training: bool = True,
    cache: Path | None,
) -> list[Block]:
    """`measure_blocks` on all ranks of a group, or what rank 0 has found before under the same conditions, on a quiet machine.

    They measure at the same time, as they run at the same time later: ranks of a node share its memory, its caches and its power.
    The blocks are those of the slowest rank, for which the others wait in each step. Every rank calls it, and gets the same.

    Raises ModelError: see there; on every rank.
    """
    cuts = [point.module for point in points]
    key = {**_key(model, conditions, training), "ranks": group.world_size, "cuts": cuts, "sizes": list(sizes)}
    path = None if cache is None else cache / f"{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:32]}.json"
    found = from_rank(lambda: _read(path), group)
    if found is not None:
        return found
    measured = from_each(lambda: measure_blocks(model, cuts, conditions, sizes, training=training), group)
    blocks, spread = _slowest(measured)
    if path is not None and group.is_main and spread < MOST_SPREAD:
        try:
            write_json(path, {"key": key, "blocks": [asdict(block) for block in blocks]})
        except OSError as error:
            log.warning("measured times cannot be stored, the next plan measures anew: %s", error)
    return blocks


def _slowest(measured: Sequence[Measurement]) -> Measurement:
    """By the largest micro-batch that all ranks have measured."""
    size = min(each.blocks[0].forward.num_samples[-1] for each in measured)
    return max(
        measured, key=lambda each: sum(block.forward.seconds(size) + block.backward.seconds(size) for block in each.blocks)
    )


def teacher_costs(
    model: nn.Module, conditions: Conditions, sizes: Sequence[int], group: Group, *, cache: Path | None
) -> list[Block]:
    """The same of a frozen teacher, forward only; one that cannot be cut is one block."""
    try:
        points = cut_points(model, conditions.image_size)
        split(model, [point.module for point in points])
    except ModelError:
        points = []
    return block_costs(model, points, conditions, sizes, group, training=False, cache=cache)


def _read(path: Path | None) -> list[Block] | None:
    """None: there is no such file, or it is damaged."""
    if path is None:
        return None
    try:
        return [_block(row) for row in json.loads(path.read_text())["blocks"]]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _key(model: nn.Module, conditions: Conditions, training: bool) -> dict[str, Any]:
    cuda = conditions.device.type == "cuda"
    shapes = [(name, list(tensor.shape), str(tensor.dtype)) for name, tensor in model.state_dict().items()]
    structure = hashlib.sha256(f"{model!r}{shapes}".encode()).hexdigest()
    return {
        "version": 3,
        "model": type(model).__name__,
        "structure": structure,
        "training": training,
        "image_size": conditions.image_size,
        "precision": conditions.precision,
        "layout": str(conditions.layout),
        "device": torch.cuda.get_device_name(conditions.device) if cuda else f"{platform.node()} {platform.machine()}",
        "threads": 0 if cuda else torch.get_num_threads(),
        "torch": torch.__version__,
    }


def _block(row: dict[str, Any]) -> Block:
    times = {name: PassTime(tuple(row[name]["num_samples"]), tuple(row[name]["times_s"])) for name in ("forward", "backward")}
    return Block(**{**row, **times})
