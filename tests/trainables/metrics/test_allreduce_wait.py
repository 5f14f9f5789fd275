"""What ranks wait for: for a slow network all of them, for a slow rank the others; and it changes no bit."""

import time
from pathlib import Path
from statistics import median

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.faults.injected import slow_all_reduce, slow_rank
from tests.trainables.jobs import config, no_telemetry, train_on_record, with_noise_scale, write_teacher
from trainables.config import TrainConfig
from trainables.distributed.group import Group
from trainables.distributed.rank_pool import RankPool
from trainables.engine.train import build, run_job
from trainables.metrics.allreduce_wait import AllreduceWait, split_waits, standard_error

EXTRA_MS = 60


def summary_of(group: Group, settings: TrainConfig, fault: str) -> tuple[dict[str, float], float]:
    """The summary, and this rank's wait in its median step: a busy machine may stop any process for a while."""
    job = build(with_noise_scale(settings), group, lambda *_: None, no_telemetry)  # whose hook `slow_all_reduce` delays
    if fault:
        undo = {"network": slow_all_reduce, "rank": slow_rank}[fault](job, EXTRA_MS / 1e3)
    summary = run_job(job)
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
    for_ranks_ms = [summary[f"rank{rank}/waits_for_ranks_ms"] for rank in (0, 1)]
    assert for_ranks_ms == pytest.approx([EXTRA_MS if fault == "rank" else 0, 0], abs=EXTRA_MS / 2)
    assert all(summary[f"rank{rank}/allreduce_wait_error_ms"] > 0 for rank in (0, 1))


def test_the_error_of_a_mean_wait_is_larger_where_long_waits_come_one_after_the_other() -> None:
    in_turn, in_a_row = [10.0, 90.0] * 20, [10.0] * 20 + [90.0] * 20
    assert standard_error(in_turn) < 6
    assert standard_error(in_a_row) == pytest.approx(40 * (8 / 7) ** 0.5 / 8**0.5)
    assert standard_error([1.0, 3.0]) == pytest.approx(1.0)


def test_what_the_last_rank_of_each_step_waits_is_the_all_reduces() -> None:
    in_turn = [{1: 5.0, 2: 30.0, 3: 7.0}, {1: 40.0, 2: 6.0, 3: 50.0, 4: 1.0}]
    network_ms, for_ranks_ms = split_waits(in_turn)
    assert network_ms == pytest.approx(6.0)
    assert for_ranks_ms == pytest.approx([24 / 3, (35 + 43) / 3])
    assert split_waits([{1: 5.0}, {}]) == (None, [])


def test_a_network_that_is_slow_now_and_then_is_no_wait_for_ranks() -> None:
    waits = {step: 100.0 if step % 5 == 0 else 3.0 for step in range(100)}
    assert split_waits([waits, dict(waits)]) == (3.0, [0.0, 0.0])


def test_a_rank_alone_waits_for_nobody(tmp_path: Path) -> None:
    summary = train_on_record(config(tmp_path, teacher=None, train={"max_steps": 12}))
    assert not [name for name in summary if "allreduce" in name]


def wait_twice(group: Group) -> tuple[list[float], list[float], list[float]]:
    """Our wait and DDP's own in milliseconds, of the same eight steps, and the gradients' bits against those of a plain pass."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(*(nn.Linear(256, 256) for _ in range(8))))
    ddp._set_ddp_runtime_logging_sample_rate(1)  # type: ignore[no-untyped-call]
    waits, of_ddp, differences = AllreduceWait(torch.device("cpu"), warmup_steps=2), [], []
    images = torch.randn(64, 256, generator=torch.Generator().manual_seed(group.rank))
    for number in range(10):
        ddp(images).square().mean().backward()
        expected = [parameter.grad.clone() for parameter in ddp.parameters() if parameter.grad is not None]
        ddp.zero_grad()
        total = ddp(images).square().mean()
        time.sleep(0.02 * (group.rank == number % 2))
        waits.begin_after(total)
        total.backward()
        waits.end()
        waits.end_step()
        ddp.logger.set_runtime_stats_and_log()
        data = ddp._get_ddp_logging_data()  # type: ignore[no-untyped-call]
        of_ddp.append((data["backward_comm_time"] - data["backward_compute_comm_overlap_time"]) / 1e6)
        found = [parameter.grad for parameter in ddp.parameters() if parameter.grad is not None]
        differences.append(max(float((a - b).abs().max()) for a, b in zip(expected, found, strict=True)))
        ddp.zero_grad()
    waits.collect()
    return list(waits.by_step.values()), of_ddp[2:], differences


def test_the_wait_is_the_one_that_ddp_times_itself(ranks: RankPool) -> None:
    for rank, (ours_ms, of_ddp_ms, differences) in enumerate(ranks.run(2, wait_twice)):
        assert len(ours_ms) == 8
        assert median(abs(ours - theirs) for ours, theirs in zip(ours_ms, of_ddp_ms, strict=True)) < 2
        assert median(ours_ms[1 - rank :: 2]) > 15  # the steps in which the other rank slept
        assert max(differences) == 0
