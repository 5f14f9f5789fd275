"""What measuring the gradient noise scale costs: seconds of a step with it beside the same step without, blocks taking turns."""

import contextlib
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist

from tests.benchmarks.pairs import Pair, train_on
from tests.benchmarks.rounds import Bar, Comparison
from tests.trainables.jobs import Recorded, no_telemetry, with_noise_scale
from trainables.config import TrainConfig
from trainables.distributed.group import Group
from trainables.distributed.rank_pool import RankPool
from trainables.engine.job import Job
from trainables.engine.train import build

BLOCK_STEPS = 4
"""Short, so that both sides of a pair meet the same ups and downs; each ends in a log line, five times as many as usual."""
PAIRS = {
    "resnet20 → resnet20, 32 pixels": Pair("resnet20", "resnet20", 32, 64, warmup_steps=BLOCK_STEPS, steps=1),
    "convnet_large → convnet_small, 8 pixels": Pair("convnet_large", "convnet_small", 8, 256, warmup_steps=BLOCK_STEPS, steps=1),
}


@contextlib.contextmanager
def comparisons(short: bool) -> Iterator[list[Comparison]]:
    """The same ranks for all lines; one worker has micro-batches to compare."""
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(RankPool(2)) as ranks:
        yield [
            Comparison(
                f"noise scale, {title}, {'2 workers' if workers == 2 else '1 worker, 2 micro-batches'}",
                "s/step",
                lambda _, pair=pair, workers=workers: measure(ranks, pair, workers, Path(folder), 2 if short else 24),
                Bar("≤", 1.01),
            )
            for title, pair in PAIRS.items()
            for workers in ((2,) if short else (2, 1))
        ]


def measure(ranks: RankPool, pair: Pair, workers: int, folder: Path, blocks: int) -> tuple[float, float]:
    """Seconds of a step with the measurement, and without, in the same processes."""
    config = pair.config(folder, workers)
    config = config.model_copy(update={"optim": config.optim.model_copy(update={"accumulate": 3 - workers})})
    ours, peer = ranks.run(workers, step_s, config, blocks)[0]
    return ours, peer


def step_s(group: Group, config: TrainConfig, blocks: int) -> tuple[float, float]:
    """The other side's median over blocks of steps, and that times the median ratio of a block to its neighbour.

    The first pair does not count.
    """
    with contextlib.ExitStack() as stack:
        watched = stack.enter_context(contextlib.closing(build(with_noise_scale(config), group, Recorded(), no_telemetry)))
        bare = stack.enter_context(contextlib.closing(build(config, group, Recorded(), no_telemetry)))
        taken: dict[bool, list[float]] = {True: [], False: []}
        for number in range(blocks + 1):
            for ours in (number % 2 == 0, number % 2 == 1):
                seconds = block_s(watched if ours else bare, group)
                if number:
                    taken[ours].append(seconds / BLOCK_STEPS)
    bare_s = statistics.median(taken[False])
    return bare_s * statistics.median(ours / peer for ours, peer in zip(taken[True], taken[False], strict=True)), bare_s


def block_s(job: Job, group: Group) -> float:
    """Seconds of one block of steps, its log line included."""
    if group.world_size > 1:
        dist.barrier()
    began = time.perf_counter()
    train_on(job, BLOCK_STEPS)
    return time.perf_counter() - began
