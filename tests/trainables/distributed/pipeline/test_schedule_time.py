"""When the stages of a schedule end: compared with the formula of the bubble and with steps worked out by hand."""

import pytest

from trainables.distributed.pipeline.schedule_time import StageTimes, order, step_seconds, stored_micro_batches


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("num_stages", "num_micro_batches"), [(1, 3), (2, 1), (2, 4), (3, 5), (4, 8)])
def test_equal_stages_wait_for_the_share_of_the_bubble_formula(schedule: str, num_stages: int, num_micro_batches: int) -> None:
    ended_s = step_seconds([StageTimes(1.0, 2.0)] * num_stages, schedule, num_micro_batches)
    assert max(ended_s) == pytest.approx(3.0 * (num_stages - 1 + num_micro_batches))


def test_1f1b_stores_activations_of_as_many_micro_batches_as_stages_follow() -> None:
    running, most = 0, 0
    for each in order("1f1b", stage=1, num_stages=4, num_micro_batches=16):
        running += 1 if each.kind == "forward" else -1
        most = max(most, running)
    assert most == stored_micro_batches("1f1b", 1, 4, 16) == 3
    assert stored_micro_batches("gpipe", 1, 4, 16) == 16
    assert stored_micro_batches("1f1b", 1, 4, 3) == 3, "fewer micro-batches than stages run as GPipe's"


def test_a_send_beside_the_passes_delays_the_stages_that_wait_for_it() -> None:
    assert step_seconds([StageTimes(1.0, 1.0, send_s=0.5), StageTimes(1.0, 1.0)], "gpipe", 1) == (5.0, 3.5)
    hidden = step_seconds([StageTimes(1.0, 1.0, send_s=0.5), StageTimes(2.0, 2.0)], "gpipe", 4)
    assert hidden == (1.5 + 8 * 2 + 1.5, 1.5 + 8 * 2)


def test_a_send_that_takes_the_processor_delays_each_pass() -> None:
    stages = [StageTimes(1.0, 1.0, send_s=0.5), StageTimes(2.0, 2.0)]
    assert step_seconds(stages, "gpipe", 4, overlapped=False) == (1 + 8 * 2.5 + 1, 1 + 8 * 2.5)


def test_a_teachers_passes_hide_behind_the_wait_for_the_first_micro_batch() -> None:
    assert step_seconds([StageTimes(1.0, 1.0), StageTimes(1.0, 1.0, teacher_s=1.0)], "gpipe", 1) == (4.0, 3.0)
    assert step_seconds([StageTimes(1.0, 1.0), StageTimes(1.0, 1.0, teacher_s=3.0)], "gpipe", 1) == (6.0, 5.0)
