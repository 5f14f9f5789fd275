"""Pipeline stages on a core each: the chosen cut beside others, one process and DDP.

    python -m tests.benchmarks.pipeline [MODEL …] [--stages N] [--rounds N]

A process a stage, pinned to a core, over Gloo; the machine should have nothing else to do. A step is the forward and backward
pass of a batch. In each round all cuts are measured, one process that has the whole batch on one core, and DDP of as many
processes. Of more than `MAX_CUTS` cuts evenly spaced ones are measured, and the chosen one.
"""

import argparse
import copy
import os
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from statistics import median

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.benchmarks.rounds import Bar
from trainables.distributed.group import Group, broadcast_result
from trainables.distributed.pipeline.block_costs import measure_blocks
from trainables.distributed.pipeline.choose_cut import StageCosts, choose_cut
from trainables.distributed.pipeline.graph import split
from trainables.distributed.pipeline.runner import PipelineRunner
from trainables.distributed.rank_pool import RankPool
from trainables.models.cut_points import cut_points
from trainables.models.registry import construct

MODELS = {"resnet18": 64, "resnet50": 64, "mobilenet_v2": 96, "densenet121": 64, "vit_b_16": 48, "resnet56": 32}
"""By image size: a step takes some tenths of a second."""
NUM_SAMPLES, NUM_CLASSES, SCHEDULE = 32, 10, "1f1b"
MAX_CUTS = 12
STEPS = 2
CHOSEN_MEDIAN, CHOSEN_WORST = Bar("≤", 1.05), Bar("≤", 1.15)
ONE, DDP = "one process", "DDP"
Step = Callable[[], None]


def measure(group: Group, name: str, rounds: int) -> tuple[str, dict[str, float]]:
    """On all ranks at once: the chosen cut, and the median seconds of a step by cut, of one process and of DDP."""
    os.sched_setaffinity(0, {group.rank % (os.cpu_count() or 1)})
    num_stages, size = group.world_size, MODELS[name]
    number = 4 * num_stages
    model = construct(name, num_classes=NUM_CLASSES, image_size=size, seed=0)
    points = cut_points(model, size)
    images_BCHW, labels_B = torch.rand(NUM_SAMPLES, 3, size, size), torch.arange(NUM_SAMPLES) % NUM_CLASSES

    def choose() -> tuple[int, ...]:
        blocks = measure_blocks(model, points, images_BCHW[: NUM_SAMPLES // number])
        return choose_cut(StageCosts(blocks, num_stages, number, SCHEDULE, parameter_copies=3.0))

    chosen = broadcast_result(choose, group, num_stages - 1)
    every = [(0, *cuts) for cuts in combinations(range(1, len(points) + 1), num_stages - 1)]
    cuts = [[points[start - 1] for start in starts[1:]] for starts in (*every[:: -(-len(every) // MAX_CUTS)], chosen)]
    names = [", ".join(cut) for cut in cuts]
    sides: dict[str, Step] = {
        named: _pipeline(model, cut, number, images_BCHW, labels_B, group) for named, cut in zip(names, cuts, strict=True)
    }
    sides[ONE] = _whole(copy.deepcopy(model), images_BCHW, labels_B) if group.rank == 0 else lambda: None
    share = slice(group.rank * NUM_SAMPLES // num_stages, (group.rank + 1) * NUM_SAMPLES // num_stages)
    sides[DDP] = _whole(DistributedDataParallel(copy.deepcopy(model)), images_BCHW[share], labels_B[share])
    return names[-1], _interleaved(sides, rounds)


def _interleaved(sides: Mapping[str, Step], rounds: int) -> dict[str, float]:
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


def _step_s(step: Step) -> float:
    """The slowest rank's; the same on all."""
    dist.barrier()
    start_s = time.perf_counter()
    step()
    took = torch.tensor(time.perf_counter() - start_s)
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took)


def _whole(model: nn.Module, images_BCHW: Tensor, labels_B: Tensor) -> Step:
    def step() -> None:
        model.zero_grad()
        F.cross_entropy(model(images_BCHW), labels_B).backward()

    return step


def _pipeline(
    model: nn.Module, cuts: Sequence[str], num_micro_batches: int, images_BCHW: Tensor, labels_B: Tensor, stages: Group
) -> Step:
    stage = split(copy.deepcopy(model), cuts)[stages.rank]
    runner = PipelineRunner(stage, images_BCHW[:2], stages, SCHEDULE)

    def step() -> None:
        stage.zero_grad()
        labels = iter(labels_B.tensor_split(num_micro_batches))

        def loss(received: Tensor) -> Tensor:
            return F.cross_entropy(stage(received), next(labels), reduction="sum") / len(labels_B)

        runner.run(images_BCHW, num_micro_batches, loss=loss if runner.is_last else None)

    return step


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.pipeline", description="The chosen cut beside others.")
    parser.add_argument("models", nargs="*", metavar="MODEL", default=list(MODELS))
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    pool, over_best = RankPool(args.stages), []
    try:
        for name in args.models:
            chosen, times_s = pool.run(args.stages, measure, name, args.rounds)[0]
            one_s, ddp_s = times_s.pop(ONE), times_s.pop(DDP)
            step_s, load = times_s[chosen], os.getloadavg()[0]
            over_best.append(step_s / min(times_s.values()))
            print(f"{name}: chosen {chosen}, {1e3 * step_s:.0f} ms, {over_best[-1]:.3f} of the best of {len(times_s)} cuts;")
            print(f"  {one_s / step_s:.2f} × one process, {ddp_s / step_s:.2f} × DDP; load {load:.1f}", flush=True)
    finally:
        pool.close()
    for title, figure, bar in (("median", median(over_best), CHOSEN_MEDIAN), ("worst", max(over_best), CHOSEN_WORST)):
        print(f"chosen ÷ best measured, {title}: {figure:.3f}, bar {bar}: {'PASS' if bar.holds(figure) else 'FAIL'}")


if __name__ == "__main__":
    main()
