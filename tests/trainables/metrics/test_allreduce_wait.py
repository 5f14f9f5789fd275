"""What ranks wait for: for a slow network all of them, for a slow rank the others; and it changes no bit."""

from pathlib import Path
from statistics import median

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.faults.injected import slow_all_reduce, slow_rank
from tests.trainables.jobs import config, no_telemetry, with_noise_scale, write_teacher
from trainables.config import TrainConfig
from trainables.distributed.group import Group
from trainables.distributed.rank_pool import RankPool
from trainables.engine import loop
from trainables.engine.job import build
from trainables.metrics.allreduce_wait import AllreduceWait, DdpClocks, exposed_ms, standard_error

EXTRA_MS = 60


def summary_of(group: Group, settings: TrainConfig, fault: str) -> tuple[dict[str, float], float]:
    """The summary, and this rank's wait in its median step: a busy machine may stop any process for a while."""
    job = build(with_noise_scale(settings), group, lambda *_: None, no_telemetry)  # whose hook `slow_all_reduce` delays
    if fault:
        undo = {"network": slow_all_reduce, "rank": slow_rank}[fault](job, EXTRA_MS / 1e3)
    summary = loop.run(job)
    if fault:
        undo()
    job.close()
    return summary, median(job.metrics.allreduce_wait.by_step.values())


@pytest.mark.parametrize("fault", ["", "network", "rank"])
def test_all_ranks_wait_for_a_slow_network_and_only_the_others_for_a_slow_rank(
    ranks: RankPool, tmp_path: Path, fault: str
) -> None:
    weights = write_teacher(tmp_path / "teacher.safetensors")
    settings = config(
        tmp_path, precision="fp32", teacher={"weights": weights}, train={"max_steps": 24, "warmup_steps": 4}, optim={"epochs": 9}
    )
    answers = ranks.run(2, summary_of, settings, fault)
    summary = answers[0][0]
    waiting = {"": (), "network": (0, 1), "rank": (0,)}[fault]
    for rank, (_, wait_ms) in enumerate(answers):
        assert wait_ms == pytest.approx(EXTRA_MS if rank in waiting else 0, abs=EXTRA_MS / 2)
    assert summary["phase/allreduce_ms"] == pytest.approx(EXTRA_MS if fault == "network" else 0, abs=EXTRA_MS / 2)
    first, second = (summary[f"rank{rank}/allreduce_wait_ms"] for rank in (0, 1))
    assert summary["phase/allreduce_wait_ms"] == pytest.approx((first + second) / 2)
    assert summary["phase/allreduce_wait_ms"] < summary["phase/backward_ms"]
    assert all(summary[f"rank{rank}/allreduce_wait_error_ms"] > 0 for rank in (0, 1))


def test_the_error_of_a_mean_wait_is_larger_where_long_waits_come_one_after_the_other() -> None:
    in_turn, in_a_row = [10.0, 90.0] * 20, [10.0] * 20 + [90.0] * 20
    assert standard_error(in_turn) < 6
    assert standard_error(in_a_row) == pytest.approx(40 * (8 / 7) ** 0.5 / 8**0.5)
    assert standard_error([1.0, 3.0]) == pytest.approx(1.0)


def test_what_the_last_rank_of_each_step_waits_is_the_all_reduces() -> None:
    in_turn = [{1: 5.0, 2: 30.0, 3: 7.0}, {1: 40.0, 2: 6.0, 3: 50.0, 4: 1.0}]
    assert exposed_ms(in_turn) == pytest.approx(6.0)
    assert exposed_ms([{1: 5.0}, {}]) is None


def test_a_rank_alone_waits_for_nobody() -> None:
    waits = AllreduceWait(None, torch.device("cpu"), warmup_steps=0)
    for _ in range(30):
        waits.end_step()
    assert waits.summary() == {}


def read_steps(group: Group) -> tuple[int, list[int]]:
    """The step whose clocks DDP itself has read after twelve of them as on a GPU, and those that were read in the end."""
    ddp = DistributedDataParallel(nn.Linear(2, 2))
    waits = AllreduceWait(DdpClocks(ddp), torch.device("cuda"), warmup_steps=0)
    for _ in range(12):
        ddp(torch.ones(1, 2)).sum().backward()
        waits.end_step()
    read = int(ddp._get_ddp_logging_data().get("iteration", 0))
    waits.sample()
    return read, list(waits.by_step)


def test_on_a_gpu_no_step_waits_for_ddps_clocks(ranks: RankPool) -> None:
    assert ranks.run(2, read_steps) == [(0, [12])] * 2
