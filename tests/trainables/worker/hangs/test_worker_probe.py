"""What a worker reports about itself while a job runs in it."""

import contextlib
import sys
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from trainables.distributed.group import Group, all_reduce_sum
from trainables.distributed.rank_pool import RankPool
from trainables.worker.hangs.worker_probe import last_collective, position, watched


def test_there_is_a_position_while_a_job_runs() -> None:
    assert position() is None
    with watched("/runs/x/student") as heartbeat:
        heartbeat.enter("eval")
        found = position()
        assert found is not None
        assert (found.activity, found.folder) == ("eval", "/runs/x/student")
    assert position() is None


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_at_its_start_a_job_goes_on_while_it_reads_and_writes(tmp_path: Path) -> None:
    def num_beats() -> int:
        found = position()
        assert found is not None
        return found.num_beats

    with watched() as heartbeat:
        before = num_beats()
        assert num_beats() == before
        (tmp_path / "file").write_bytes(bytes(2**21))
        assert num_beats() == before + 1
        heartbeat.enter("train")
        (tmp_path / "file").write_bytes(bytes(2**21))
        assert num_beats() == before + 2  # the one of its own


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("error", [psutil.AccessDenied(), PermissionError()])
def test_a_worker_whose_counters_cannot_be_read_has_a_position(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: psutil.Process) -> None:
        raise error

    monkeypatch.setattr(psutil.Process, "io_counters", refuse)
    with watched():
        assert position() is not None


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
