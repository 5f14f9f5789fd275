"""Pipeline stages on a core each: the planned cut beside every other, the predicted step beside the measured one.

    python -m tests.benchmarks.pipeline [MODEL …] [--stages N] [--rounds N] [--json FILE]

A process a stage, pinned to a core, over Gloo; the machine should have nothing else to do. A step is the forward and backward
pass of a batch. In each round all cuts are measured, one process that has the whole batch on one core, and DDP of as many
processes. Of more than `MOST_CUTS` cuts evenly spaced ones are measured, and the planned one. `sleeping0`, `sleeping1` … are
models that sleep instead of computing: for more stages than cores, and for a machine that is in use.
"""

import argparse
import copy
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations, pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.benchmarks.rounds import Bar
from tests.benchmarks.sleeping_model import sleeping_model
from trainables.distributed.group import Group
from trainables.distributed.pipeline.block_costs import Conditions
from trainables.distributed.pipeline.costs import Block, Devices
from trainables.distributed.pipeline.cut_points import CutPoint, cut_points
from trainables.distributed.pipeline.link import measure_link
from trainables.distributed.pipeline.plan import Planner
from trainables.distributed.pipeline.plan_cut import block_costs, sizes_to_measure, starts_of
from trainables.distributed.pipeline.runner import Boundary, PipelineRunner, micro_batch_sizes
from trainables.distributed.pipeline.stage_module import split
from trainables.distributed.pipeline.starts import Starts
from trainables.distributed.rank_pool import RankPool
from trainables.models.registry import construct

MODELS = {"resnet18": 64, "resnet50": 64, "mobilenet_v2": 96, "densenet121": 64, "vit_b_16": 48, "resnet56": 32}
"""By image size: a step takes some tenths of a second."""
NUM_SAMPLES, NUM_CLASSES, SCHEDULE = 32, 10, "1f1b"
MOST_CUTS = 12
STEPS = 2
PLANNED_MEDIAN, PLANNED_WORST = Bar("≤", 1.03), Bar("≤", 1.08)
PREDICTED_WITHIN = Bar("≤", 0.1)
OF_BUBBLE_FORMULA = Bar("≥", 0.9)
SLEEPING = "sleeping"
"""With a seed: a model that sleeps instead of computing."""
ONE, DDP = "one process", "ddp"
CPU = torch.device("cpu")


@dataclass
class Measured:
    """Of one model, in seconds of a step: medians over the rounds."""

    model: str
    num_stages: int
    num_cuts: int
    """That there are; `cuts_s` has those that were measured."""
    planned: str
    num_micro_batches: int
    cuts_s: dict[str, float]
    predicted_s: dict[str, float]
    one_core_s: float
    ddp_s: float
    link_gb_per_s: float

    @property
    def planned_s(self) -> float:
        return self.cuts_s[self.planned]

    @property
    def over_best(self) -> float:
        return self.planned_s / min(self.cuts_s.values())

    @property
    def over_measured(self) -> float:
        return self.predicted_s[self.planned] / self.planned_s

    @property
    def of_bubble_formula(self) -> float:
        """The speed beside one process, of the p·m/(m + p − 1) that p equal stages would have."""
        allowed = self.num_stages * self.num_micro_batches / (self.num_micro_batches + self.num_stages - 1)
        return self.one_core_s / self.planned_s / allowed


def measure(group: Group, name: str, rounds: int) -> Measured:
    """On all ranks at once."""
    os.sched_setaffinity(0, {group.rank % (os.cpu_count() or 1)})
    num_stages, image_size = group.world_size, MODELS.get(name, 64)
    model = _model(name, image_size)
    assert dist.group.WORLD is not None
    link = measure_link(dist.group.WORLD, CPU)
    points = cut_points(model, image_size)
    sizes = sizes_to_measure(NUM_SAMPLES, num_stages, None)
    blocks = block_costs(model, points, Conditions(image_size, CPU, "fp32"), sizes, group, cache=None)
    planner = Planner(blocks, Devices(num_stages, link=link), SCHEDULE)
    plan = planner.plan(NUM_SAMPLES)
    possible = [
        starts
        for starts in combinations(range(len(blocks)), num_stages)
        if starts[0] == 0
        and all(any(block.parameter_bytes for block in blocks[slice(*part)]) for part in pairwise([*starts, None]))
    ]
    planned = starts_of(points, plan.cuts, num_stages)
    every = -(-len(possible) // MOST_CUTS)
    sample = {_named(blocks, starts): starts for starts in sorted({*possible[::every], planned})}
    images_BCHW = torch.rand(NUM_SAMPLES, 3, image_size, image_size)
    labels_B = torch.arange(NUM_SAMPLES) % NUM_CLASSES
    sides = {
        cut: _pipeline(model, [points[start - 1] for start in starts[1:]], plan.num_micro_batches, images_BCHW, labels_B, group)
        for cut, starts in sample.items()
    }
    sides[ONE] = _whole(copy.deepcopy(model), images_BCHW, labels_B) if group.rank == 0 else lambda: None
    share = slice(group.rank * NUM_SAMPLES // num_stages, (group.rank + 1) * NUM_SAMPLES // num_stages)
    sides[DDP] = _whole(DistributedDataParallel(copy.deepcopy(model)), images_BCHW[share], labels_B[share])
    medians = _interleaved(sides, rounds)
    return Measured(
        model=name,
        num_stages=num_stages,
        num_cuts=len(possible),
        planned=_named(blocks, planned),
        num_micro_batches=plan.num_micro_batches,
        cuts_s={cut: medians[cut] for cut in sample},
        predicted_s={cut: planner.expect(starts, NUM_SAMPLES, plan.num_micro_batches).step_s for cut, starts in sample.items()},
        one_core_s=medians[ONE],
        ddp_s=medians[DDP],
        link_gb_per_s=link.bytes_per_s / 1e9,
    )


def _named(blocks: Sequence[Block], starts: Starts) -> str:
    return ", ".join(blocks[start].begins_at for start in starts[1:])


def _interleaved(sides: Mapping[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    """The median step of each side; one round more warms up."""
    times_s: dict[str, list[float]] = {side: [] for side in sides}
    names = list(sides)
    for number in range(rounds + 1):
        first = number % len(names)
        for side in names[first:] + names[:first]:
            step_s = min(_step_s(sides[side]) for _ in range(STEPS))
            if number:
                times_s[side].append(step_s)
    return {side: median(each) for side, each in times_s.items()}


def _model(name: str, image_size: int) -> nn.Module:
    if name.startswith(SLEEPING):
        return sleeping_model(int(name.removeprefix(SLEEPING)), NUM_CLASSES)
    return construct(name, num_classes=NUM_CLASSES, image_size=image_size, seed=0)


def _step_s(step: Callable[[], None]) -> float:
    """Of the slower rank; the same on both."""
    dist.barrier()
    start_s = time.perf_counter()
    step()
    took = torch.tensor(time.perf_counter() - start_s)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)


def _whole(model: nn.Module, images_BCHW: Tensor, labels_B: Tensor) -> Callable[[], None]:
    def step() -> None:
        model.zero_grad()
        F.cross_entropy(model(images_BCHW), labels_B).backward()

    return step


def _pipeline(
    model: nn.Module, cuts: Sequence[CutPoint], num_micro_batches: int, images_BCHW: Tensor, labels_B: Tensor, stages: Group
) -> Callable[[], None]:
    stage = split(copy.deepcopy(model), [cut.module for cut in cuts])[stages.rank]
    images = Boundary(tuple(images_BCHW.shape[1:]), torch.float32, has_gradient=False)
    runner = PipelineRunner(stages, (images, *(Boundary(cut.shape, cut.dtype) for cut in cuts)), SCHEDULE)

    def step() -> None:
        stage.zero_grad()
        labels = iter(labels_B.split(micro_batch_sizes(len(labels_B), num_micro_batches)))

        def loss(received: Tensor) -> Tensor:
            return F.cross_entropy(stage(received), next(labels), reduction="sum") / len(labels_B)

        runner.train(images_BCHW, num_micro_batches, loss if runner.is_last else stage)

    return step


def show(measured: Measured) -> None:
    """A row for each cut, and what is judged."""
    stages = f"{measured.num_stages} stages, {measured.num_micro_batches} micro-batches"
    print(f"{measured.model}: {len(measured.cuts_s)} of {measured.num_cuts} cuts, {stages}")
    for cut, step_s in measured.cuts_s.items():
        mark = "  planned" if cut == measured.planned else ""
        ratio = measured.predicted_s[cut] / step_s
        print(f"  {cut:40} {1e3 * step_s:8.1f} ms   predicted ÷ measured {ratio:.3f}{mark}")
    print(f"  planned ÷ best {measured.over_best:.3f}; predicted ÷ measured {measured.over_measured:.3f}")
    speed = measured.one_core_s / measured.planned_s
    print(f"  {speed:.2f} × one process on one core, {measured.of_bubble_formula:.3f} of the bubble formula")
    link, load = measured.link_gb_per_s, os.getloadavg()[0]
    print(f"  {measured.ddp_s / measured.planned_s:.2f} × DDP; {link:.2f} GB/s; load {load:.1f}\n", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.pipeline", description="Every cut of a pipeline.")
    parser.add_argument("models", nargs="*", metavar="MODEL", default=list(MODELS))
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    pool = RankPool(args.stages)
    found: list[Measured] = []
    try:
        for name in args.models:
            found.append(pool.run(args.stages, measure, name, args.rounds)[0])
            show(found[-1])
    finally:
        pool.close()
    planned = [each.over_best for each in found]
    judged: list[tuple[str, float, Bar]] = [
        ("planned ÷ best measured, median", median(planned), PLANNED_MEDIAN),
        ("planned ÷ best measured, worst", max(planned), PLANNED_WORST),
        ("|predicted ÷ measured − 1|, worst", max(abs(each.over_measured - 1) for each in found), PREDICTED_WITHIN),
        ("of the bubble formula, worst", min(each.of_bubble_formula for each in found), OF_BUBBLE_FORMULA),
    ]
    for title, figure, bar in judged:
        print(f"{title}: {figure:.3f}, bar {bar}: {'PASS' if bar.holds(figure) else 'FAIL'}")
    if args.json:
        rows: list[dict[str, Any]] = [asdict(each) for each in found]
        args.json.write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
