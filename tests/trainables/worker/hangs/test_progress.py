"""When a job counts as hanging, by what its ranks have answered."""

import pytest

from trainables.metrics.heartbeat import Position
from trainables.teachers.service.client import RESPONSE_TIMEOUT_S
from trainables.worker.hangs.progress import JobProgress


def training(beats: int, step: int = 3, *, batch_s: float | None = 0.5) -> Position:
    return Position("train", step, "student", beats, batch_s)


def test_a_job_hangs_once_no_rank_has_gone_on_for_so_long() -> None:
    progress = JobProgress(10.0, 2, began_s=0.0)
    for now_s in range(1, 30):
        progress.update(0, training(now_s), now_s)
        progress.update(1, training(1), now_s)
        assert not progress.is_hung(now_s)  # rank 1 may wait for rank 0
    assert not progress.is_hung(39.0)
    assert progress.is_hung(39.1)
    assert progress.quiet_s(39.5) == 10.5


def test_a_rank_that_does_not_answer_has_not_gone_on() -> None:
    progress = JobProgress(10.0, 2, began_s=0.0)
    progress.update(0, training(1), 1.0)
    progress.update(1, training(1), 1.0)
    assert progress.is_hung(11.5)


def test_a_rank_that_fell_silent_at_its_start_has_no_longer_than_those_that_wait_for_it() -> None:
    progress = JobProgress(10.0, 2, began_s=0.0)
    for now_s in range(1, 22):  # rank 1 was stopped before it answered again
        progress.update(0, training(min(now_s, 9)), now_s)
        assert progress.is_hung(now_s) is (now_s > 19)


def test_what_may_compile_has_ten_times_as_long_and_so_has_the_start() -> None:
    progress = JobProgress(10.0, 1, began_s=0.0)
    assert not progress.is_hung(99.0)
    assert progress.is_hung(101.0)
    progress.update(0, training(1, batch_s=None), 101.0)
    assert not progress.is_hung(200.0)
    assert progress.is_hung(202.0)
    progress.update(0, training(2), 202.0)
    assert progress.is_hung(213.0)


def test_what_takes_long_may_take_ten_times_as_long_until_it_goes_on() -> None:
    progress = JobProgress(10.0, 2, began_s=0.0)
    progress.update(0, training(1), 1.0)
    progress.update(1, training(1), 1.0)
    progress.is_compiling_or_locked = True
    progress.update(0, training(1), 50.0)
    assert not progress.is_hung(100.0)
    assert progress.is_hung(102.0)
    progress.update(1, training(2), 102.0)
    assert not progress.is_hung(111.0)
    assert progress.is_hung(113.0)


def test_ranks_without_a_job_are_not_waited_for() -> None:
    progress = JobProgress(10.0, 2, began_s=0.0)
    progress.update(0, None, 1.0)
    progress.update(1, None, 1.0)
    assert not progress.is_hung(1e6)
    progress.update(1, training(1), 2.0)
    assert progress.is_hung(13.0)


@pytest.mark.parametrize(("batch_s", "limit_s"), [(None, 1200.0), (0.5, 120.0), (30.0, 900.0)])
def test_auto_waits_for_thirty_of_the_last_step_and_never_less_than_two_minutes(batch_s: float | None, limit_s: float) -> None:
    progress = JobProgress("auto", 1, began_s=0.0)
    assert progress.limit_s(training(1, batch_s=batch_s)) == limit_s
    assert progress.limit_s(Position("eval", 3, "", 1, batch_s)) == limit_s


def test_a_teacher_service_has_longer_than_its_client_waits_for_it() -> None:
    waiting = Position("train", 80, "teacher", 1, 0.5)
    assert JobProgress("auto", 1, began_s=0.0, has_service=True).limit_s(waiting) > RESPONSE_TIMEOUT_S
    assert JobProgress("auto", 1, began_s=0.0).limit_s(waiting) == 120.0


def test_a_checkpoint_has_five_times_as_long_and_zero_is_never() -> None:
    saving = Position("checkpoint", 80, "", 1)
    assert JobProgress(10.0, 1, began_s=0.0).limit_s(saving) == 50.0
    assert not JobProgress(0.0, 1, began_s=0.0).is_hung(1e9)
