"""What a method costs: its training step beside kd's with the same models, in time and in memory; and what gathering costs.

Time by blocks of steps that take turns, as processor time, on one worker. Memory is the peak that a step allocates beyond what
there is before it, as torch's CPU allocator tells. Gathering: a step on two workers beside the same step whose rows of the other
worker are copies of the own ones, so that the losses calculate as much and nothing is sent; wall time, since it waits.
"""

import contextlib
import gc
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from tests.benchmarks.pairs import Pair, train_on
from tests.benchmarks.rounds import Bar, Comparison
from tests.trainables.jobs import Recorded, no_telemetry
from trainables.config import TrainConfig
from trainables.distributed.gather import Gather
from trainables.distributed.group import Group
from trainables.distributed.rank_pool import RankPool
from trainables.engine import passes as steps
from trainables.engine.job import Job
from trainables.engine.train import build
from trainables.methods.registry import METHODS, load_method

PAIR = Pair("resnet14", "resnet8", 32, 64, warmup_steps=2, steps=1)
BLOCK_STEPS = 2
OPTIONS: dict[str, dict[str, Any]] = {"crd": {"negatives": 1024}}
"""A bank of 12,800 noise images has no 16384 of other classes."""


@contextlib.contextmanager
def comparisons(short: bool) -> Iterator[list[Comparison]]:
    torch.set_num_threads(1)
    blocks = 2 if short else 12
    names = [name for name in METHODS if name != "kd" and load_method(name).terms and load_method(name).requires.teacher]
    names = ["at", "sp"] if short else names
    with tempfile.TemporaryDirectory() as folder, contextlib.closing(RankPool(2)) as ranks:
        root = Path(folder)
        lines = [
            Comparison(
                f"methods, {name} / kd, {PAIR.teacher} → {PAIR.student}",
                "s/step",
                lambda _, name=name: step_s(config(root, name, 1), config(root, "kd", 1), blocks),
                None,
                cell=(name, "time / kd"),
            )
            for name in names
        ]
        lines += [
            Comparison(
                f"methods, {name} / kd, peak of a step",
                "MiB",
                lambda _, name=name: (peak_mib(config(root, name, 1)), peak_mib(config(root, "kd", 1))),
                None,
                cell=(name, "peak / kd"),
            )
            for name in names
        ]
        lines += [
            Comparison(
                f"methods, {name} on 2 workers, gathered / copied",
                "s/step",
                lambda _, name=name: ranks.run(2, gathering_s, config(root, name, 2), blocks)[0],
                Bar("≤", 1.10),
                cell=(name, "gathered / copied"),
            )
            for name in names
            if load_method(name).requires.whole_batch
        ]
        yield lines


def config(root: Path, name: str, workers: int) -> TrainConfig:
    """The pair's job by this method alone."""
    plain = PAIR.config(root, workers).model_dump(mode="json")
    slow = {**plain["optim"], "lr": 1e-4}  # noise is learned by no method, and at weight 400 in the recipe's steps it diverges
    return TrainConfig.model_validate(
        {**plain, "optim": slow, "distill": {"method": [name], "options": {name: OPTIONS.get(name, {})}}}
    )


def opened(stack: contextlib.ExitStack, job: TrainConfig, group: Group) -> Job:
    return stack.enter_context(contextlib.closing(build(job, group, Recorded(), no_telemetry)))


def step_s(ours: TrainConfig, peer: TrainConfig, blocks: int) -> tuple[float, float]:
    """Seconds of processor time a step: the peer's median over blocks, and that times the median ratio to its neighbour."""
    with contextlib.ExitStack() as stack:
        jobs = [opened(stack, job, Group()) for job in (ours, peer)]
        return in_blocks([partial(train_on, job, BLOCK_STEPS) for job in jobs], blocks, time.process_time)


def in_blocks(run: Sequence[Callable[[], None]], blocks: int, clock: Callable[[], float]) -> tuple[float, float]:
    """Seconds of a step on either side, blocks taking turns; the first block of each does not count."""
    taken: list[list[float]] = [[], []]
    for number in range(blocks + 1):
        for side in ((0, 1), (1, 0))[number % 2]:
            if dist.is_initialized():
                dist.barrier()
            began = clock()
            run[side]()
            if number:
                taken[side].append((clock() - began) / BLOCK_STEPS)
    peer_s = statistics.median(taken[1])
    return peer_s * statistics.median(ours / peer for ours, peer in zip(*taken, strict=True)), peer_s


def peak_mib(job_config: TrainConfig) -> float:
    """The most that a step allocates beyond what there is before it."""
    with contextlib.ExitStack() as stack:
        job = opened(stack, job_config, Group())
        train_on(job, 2)
        gc.collect()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
            train_on(job, 1)
    events = watched.profiler.kineto_results.events()
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    return max(accumulate(num_bytes for _, num_bytes in changes)) / 2**20


class Copied(Gather):
    """The own rows in the place of everyone's."""

    def __call__(self, own: Tensor) -> Tensor:
        return torch.cat([own] * dist.get_world_size())


def gathering_s(group: Group, job: TrainConfig, blocks: int) -> tuple[float, float]:
    """Seconds of a step that gathers, and of one that copies, in the same processes."""
    with contextlib.ExitStack() as stack:
        run = [partial(block, opened(stack, job, group), kind) for kind in (Gather, Copied)]
        return in_blocks(run, blocks, time.perf_counter)


def block(job: Job, kind: type[Gather]) -> None:
    """Steps whose rows are gathered as `kind` does it."""
    proper, steps.Gather = steps.Gather, kind  # type: ignore[misc]
    try:
        train_on(job, BLOCK_STEPS)
    finally:
        steps.Gather = proper  # type: ignore[misc]
