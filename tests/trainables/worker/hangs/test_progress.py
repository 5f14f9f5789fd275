"""When a job counts as hanging, by what its ranks have answered."""

import pytest

from trainables.metrics.heartbeat import Position
from trainables.teachers.service.client import RESPONSE_TIMEOUT_S
from trainables.worker.hangs.progress import JobProgress


def training(beats: int, step: int = 3, *, warm: bool = True) -> Position:
    return Position("train", step, "student", beats, warm)


def test_a_job_hangs_once_no_rank_has_gone_on_for_so_long() -> None:
    progress = JobProgress(10.0, 2, began_s=0.0)
    for now_s in range(1, 30):
        progress.update(0, training(now_s), now_s)
        progress.update(1, training(1), now_s)
        assert not progress.is_hung(now_s)  # rank 1 may wait for rank 0
    assert not progress.is_hung(39.0)
    assert progress.is_hung(39.1)
    assert progress.longest_s(39.5) == 10.5


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
    progress.update(0, training(1, warm=False), 101.0)
    assert not progress.is_hung(200.0)
    assert progress.is_hung(202.0)
    progress.update(0, training(2), 202.0)
    assert progress.is_hung(213.0)


def test_what_takes_long_may_take_ten_times_as_long_until_it_goes_on() -> None:
    progress = JobProgress(10.0, 2, began_s=0.0)
    progress.update(0, training(1), 1.0)
    progress.update(1, training(1), 1.0)
    progress.is_extended = True
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


@pytest.mark.parametrize(("step_s", "limit_s"), [(0.5, 120.0), (7.0, 350.0)])
def test_auto_waits_for_fifty_steady_steps_and_never_less_than_two_minutes(step_s: float, limit_s: float) -> None:
    progress, now_s, beats = JobProgress("auto", 1, began_s=0.0), 300.0, 0  # a long first step is no steady one
    progress.update(0, training(0, step=0, warm=False), now_s)
    for step in range(1, 80):
        for part in (0.25, 0.75):  # an answer inside of the step
            now_s += part * step_s
            beats += 1
            progress.update(0, training(beats, step=step if part == 0.75 else step - 1), now_s)
    assert progress.limit_s(training(1)) == pytest.approx(limit_s)
    assert progress.limit_s(Position("checkpoint", 80, "", 1, True)) == pytest.approx(5 * limit_s)


def test_a_second_step_that_is_as_slow_as_the_first_one_does_not_hang() -> None:
    progress, now_s = JobProgress("auto", 1, began_s=0.0), 0.0
    for beats, step in ((0, 0), (1, 0), (2, 1)):  # a phase of 150 s each
        now_s += 150.0
        progress.update(0, training(beats, step, warm=step > 0), now_s)
    for waited_s in (130.0, 200.0):
        progress.update(0, training(2, 1), now_s + waited_s)
        assert not progress.is_hung(now_s + waited_s)
    assert progress.limit_s(training(2, 1)) == pytest.approx(10 * 300.0)
    progress.update(0, training(3, 2), now_s + 300.0)
    assert progress.limit_s(training(3, 2)) == pytest.approx(50 * 300.0)


def test_auto_waits_for_a_teacher_service_for_longer_than_its_client_does() -> None:
    waiting = Position("train", 80, "teacher", 1, True)
    assert JobProgress("auto", 1, began_s=0.0, has_service=True).limit_s(waiting) > RESPONSE_TIMEOUT_S
    assert JobProgress("auto", 1, began_s=0.0).limit_s(waiting) == 120.0
    assert JobProgress(10.0, 1, began_s=0.0).limit_s(waiting) == 10.0


def test_a_number_counts_for_checkpoints_too_and_zero_is_never() -> None:
    saving = Position("checkpoint", 80, "", 1, True)
    assert JobProgress(10.0, 1, began_s=0.0).limit_s(saving) == 10.0
    assert not JobProgress(0.0, 1, began_s=0.0).is_hung(1e9)


def test_the_age_of_a_job_goes_on_where_its_ranks_answer_no_more() -> None:
    progress = JobProgress(10.0, 2, began_s=0.0)
    progress.update(0, Position("train", 3, "data", 1, True, 30.0), 40.0)
    progress.update(0, Position("train", 3, "data", 1, True, 31.0), 41.0)
    assert progress.age_s(50.0) >= 40.0
