"""Sums, counts and buffers over ranks, their seeds, and the check that the replicas are equal."""

from typing import Any

import pytest
import torch
from torch import nn

from trainables.distributed import group as group_module
from trainables.distributed.group import (
    GlobalCount,
    Group,
    all_reduce_sum,
    broadcast_buffers,
    check_replicas,
    checksum,
    gather_objects,
    group_arguments,
    replica_checksums,
    seed_rank,
)
from trainables.distributed.rank_pool import RankPool
from trainables.errors import TrainingError

CPU = torch.device("cpu")


def collectives(group: Group) -> dict[str, Any]:
    """What each function gives this rank."""
    norm = nn.BatchNorm1d(2)
    assert norm.running_mean is not None
    norm.running_mean.fill_(group.rank + 5.0)
    broadcast_buffers(norm, group)
    count, nothing = GlobalCount(group.rank + 1, group), GlobalCount(0, group)
    known = GlobalCount(3 - group.rank, group, num_samples=6)
    return {
        "sum": float(all_reduce_sum(torch.tensor(group.rank + 1.0), group)),
        "totals": count.totals.tolist(),
        "weight": float(count.weight()),
        "known totals": known.totals.tolist(),
        "known weight": known.weight(),
        "weight of nothing": float(nothing.weight()),
        "objects": gather_objects(str(group.rank), group),
        "running_mean": norm.running_mean.tolist(),
    }


@pytest.mark.parametrize("n", [1, 3])
def test_every_rank_gets_the_same_of_all(ranks: RankPool, n: int) -> None:
    num_samples = n * (n + 1) / 2
    expected = {
        "sum": num_samples,
        "totals": [num_samples, n],
        "weight": n / num_samples,
        "known totals": [6, n] if n > 1 else [3, 1],
        "known weight": n / 6 if n > 1 else 1 / 3,
        "weight of nothing": n,
        "objects": [str(rank) for rank in range(n)],
        "running_mean": [5.0, 5.0],
    }
    assert ranks.run(n, collectives) == [expected] * n


def differ_on(group: Group, rank: int, num_stages: int = 1) -> None:
    model = nn.Linear(2, 2)
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.25 if group.rank == rank else 0.5 + group.rank % num_stages)
    check_replicas(replica_checksums(model, group).tolist(), 7, num_stages)


def raises_on_differing(group: Group, rank: int, num_stages: int) -> str:
    with pytest.raises(TrainingError) as caught:
        differ_on(group, rank, num_stages)
    return str(caught.value)


def test_replicas_that_differ_are_named_and_equal_ones_pass(ranks: RankPool) -> None:
    ranks.run(3, differ_on, 9)
    with pytest.raises(TrainingError, match=r"^step 7: the parameters of rank 2 differ from rank 0's"):
        ranks.run(3, differ_on, 2)


def test_all_ranks_learn_that_one_pipeline_stage_differs(ranks: RankPool) -> None:
    ranks.run(3, differ_on, 9, 2)
    for message in ranks.run(3, raises_on_differing, 2, 2):
        assert message.startswith("step 7: the parameters of rank 2 differ from the first replica's")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.int8])
def test_a_checksum_depends_on_each_bit_and_on_the_order(dtype: torch.dtype) -> None:
    a, b = torch.ones(3, dtype=dtype), torch.zeros(3, dtype=dtype)
    different = [(a, b), (b, a), (a, a)]
    if dtype.is_floating_point:
        different.append((a, -b))
    assert len({int(checksum(pair, CPU)) for pair in different}) == len(different)
    assert int(checksum((a, b), CPU)) == int(checksum((a.clone(), b.clone()), CPU))


def test_a_checksum_of_many_parameters_is_of_each_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_module, "_CHUNK", 4)
    parameters = [torch.arange(float(size)) for size in (3, 9, 1, 1, 1)]
    sums = {int(checksum(parameters, CPU))}
    for parameter in parameters:
        for index in range(len(parameter)):
            parameter[index] += 1
            sums.add(int(checksum(parameters, CPU)))
            parameter[index] -= 1
    assert len(sums) == 1 + 15


def test_each_rank_of_each_seed_draws_numbers_of_its_own() -> None:
    with torch.random.fork_rng():
        seeds = []
        for seed, rank in ((0, 0), (0, 1), (1, 0), (1, 1)):
            seed_rank(seed, rank)
            seeds.append(torch.initial_seed())
    assert len(set(seeds)) == 4


def test_nccl_is_given_the_workers_own_gpu_whatever_its_global_rank() -> None:
    assert group_arguments("nccl", torch.device("cuda:1")) == {"backend": "nccl", "device_id": torch.device("cuda:1")}
    assert group_arguments("gloo", CPU) == {"backend": "gloo"}
