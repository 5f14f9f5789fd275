"""What the watch asks of torch in a worker; the watch itself is in `tests/integration/test_worker_start.py`, `test_hangs.py`."""

import contextlib

import pytest
import torch
import torch.distributed as dist

from trainables.distributed.group import Group, all_reduce_sum
from trainables.distributed.rank_pool import RankPool
from trainables.worker.hangs.hang_watch import last_collective


def collectives(group: Group) -> list[tuple[int, str] | None]:
    """What torch's flight recorder has after each of two sums and a gather."""
    found = []
    for collective in (all_reduce_sum, all_reduce_sum):
        collective(torch.ones(1), group)
        found.append(last_collective())
    dist.all_gather([torch.ones(1) for _ in range(group.world_size)], torch.ones(1))
    return [*found, last_collective()]


@pytest.mark.processes
def test_the_last_collective_that_a_rank_began_has_a_number_and_a_name() -> None:
    with contextlib.closing(RankPool(2, fork_server=True)) as pool:
        for first, second, third in pool.run(2, collectives):
            assert [first[1], second[1], third[1]] == ["gloo:all_reduce", "gloo:all_reduce", "gloo:all_gather"]
            assert (second[0], third[0]) == (first[0] + 1, first[0] + 2)
