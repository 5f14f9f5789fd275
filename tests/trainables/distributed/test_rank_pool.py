import contextlib
import os
import signal
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from trainables.distributed import rank_pool
from trainables.distributed.group import Group
from trainables.distributed.rank_pool import RankDiedError, RankPool


def total(group: Group) -> float:
    value = torch.tensor([group.rank + 1.0])
    dist.all_reduce(value)
    return value.item()


def die_on_rank_1(group: Group) -> float:
    if group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return total(group)


def own_process(group: Group) -> int:
    return os.getpid()


def hash_of_a_word(group: Group) -> int:
    return hash("a word")


def variable(group: Group) -> str | None:
    return os.environ.get("OF_THE_PARENT")


def refuse_nobody(group: Group) -> int:
    return 7


def refuse(group: Group) -> None:
    if group.rank == 0:
        raise ValueError("not here")


def refuse_in_a_group_of_its_own(group: Group) -> None:
    """The other rank waits half an hour: torch's timeout of a group that is made without one."""
    of_both = dist.new_group()
    if group.rank == 0:
        raise ValueError("not here")
    dist.barrier(group=of_both)


class NotPicklableError(Exception):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")
        self.lock = threading.Lock()


class TwoArgumentsError(NotPicklableError):
    def __init__(self, first: str, second: str) -> None:
        super().__init__(first, second)
        del self.lock


def raise_it(group: Group, error: type[NotPicklableError]) -> None:
    raise error("one", "two")


def result_with_a_lock(group: Group) -> object:
    return threading.Lock()


@pytest.mark.parametrize("error", [NotPicklableError, TwoArgumentsError])
def test_an_error_that_cannot_be_pickled_arrives_as_its_text_with_its_stack(
    ranks: RankPool, error: type[NotPicklableError]
) -> None:
    with pytest.raises(RuntimeError, match=f"{error.__name__}: one and two") as caught:
        ranks.run(2, raise_it, error)
    assert "in raise_it" in str(caught.value.__cause__)
    with pytest.raises(TypeError, match="cannot pickle"):
        ranks.run(1, result_with_a_lock)
    assert ranks.run(2, total) == [3.0, 3.0]


def test_more_ranks_than_the_pool_has_are_refused(ranks: RankPool) -> None:
    with pytest.raises(ValueError, match="the pool has 3 ranks, not 4"):
        ranks.run(4, total)


@pytest.mark.processes
def test_what_an_interrupted_run_would_have_returned_is_no_result_of_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with contextlib.closing(RankPool(2, fork_server=True)) as pool:
        monkeypatch.setattr(rank_pool, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pool.run(2, total)
        monkeypatch.undo()
        assert pool.run(2, own_process) != [3.0, 3.0]


def test_every_run_has_a_group_of_its_own_size(ranks: RankPool) -> None:
    assert [ranks.run(2, total), ranks.run(3, total), ranks.run(2, total)] == [[3.0] * 2, [6.0] * 3, [3.0] * 2]


def test_what_a_rank_raised_is_raised_with_its_stack_and_the_next_run_goes_on(ranks: RankPool) -> None:
    with pytest.raises(ValueError, match="not here") as caught:
        ranks.run(2, refuse)
    assert "in refuse" in str(caught.value.__cause__)
    assert ranks.run(2, total) == [3.0, 3.0]


@pytest.mark.processes
@pytest.mark.parametrize("fork_server", [False, True])
def test_ranks_have_the_environment_of_the_process_that_started_them(
    ranks: RankPool, monkeypatch: pytest.MonkeyPatch, fork_server: bool
) -> None:
    """Also from a fork server that was started before."""
    monkeypatch.setenv("OF_THE_PARENT", "set")
    with contextlib.closing(RankPool(1, fork_server=fork_server)) as pool:
        assert pool.run(1, variable) == ["set"]


@pytest.mark.processes
def test_spawned_ranks_do_not_share_a_hash_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    with contextlib.closing(RankPool(2)) as pool:
        assert len(set(pool.run(2, hash_of_a_word))) == 2


@pytest.mark.processes
def test_a_pool_that_lost_a_rank_starts_anew() -> None:
    pool = RankPool(2, fork_server=True)
    with pytest.raises(RankDiedError, match="rank 1 died without a result"):
        pool.run(2, die_on_rank_1)
    assert pool.run(2, total) == [3.0, 3.0]

    (last,) = pool.run(2, own_process)[1:]
    os.kill(last, signal.SIGKILL)  # between two runs
    with pytest.raises(RankDiedError, match=r"rank (1 )?died"):
        pool.run(2, total)
    assert pool.run(1, refuse_nobody) == [7]
    assert pool.run(2, total) == [3.0, 3.0]
    pool.close()


@pytest.mark.processes
def test_ranks_that_wait_for_one_that_raised_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = RankPool(2, fork_server=True)
    monkeypatch.setattr("trainables.distributed.rank_pool.COLLECTIVE_TIMEOUT", timedelta(seconds=1))
    with pytest.raises(ValueError, match="not here"):
        pool.run(2, refuse_in_a_group_of_its_own)
    assert pool.run(2, total) == [3.0, 3.0]
    pool.close()
