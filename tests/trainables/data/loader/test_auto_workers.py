"""Threads are let go where a step does without them, and come back where it waits. Time here is simulated."""

import pytest

from trainables.data.loader.auto_workers import AutoWorkers

BATCH = 100


def _train(auto: AutoWorkers, batches: int, *, a_thread: float, step: float, waits_with: int = 0) -> list[str]:
    """So many batches of a step that takes `step` images/s if fed by threads of `a_thread` images/s each; the lines said."""
    messages = []
    for _ in range(batches):
        delivered = a_thread * auto.threads
        step_s = BATCH / step
        wait_s = max(0.0, BATCH / delivered - step_s) if delivered < step or auto.threads <= waits_with else 0.0
        wait_s = max(wait_s, 0.1 * step_s) if auto.threads <= waits_with else wait_s
        if line := auto.add(BATCH, BATCH / a_thread, wait_s, step_s + wait_s):
            messages.append(line)
    return messages


def test_the_least_number_that_feeds_the_step_with_a_quarter_to_spare_is_used() -> None:
    auto = AutoWorkers(7)
    messages = _train(auto, 200, a_thread=310, step=700)
    assert messages == ["loader workers: 3 of 7 (auto): a thread decodes 310 images/s, a step takes 700"]
    assert auto.threads == 3


@pytest.mark.parametrize(("step", "threads"), [(1, 1), (190, 1), (250, 2), (790, 4), (830, 5), (5000, 7)])
def test_never_fewer_than_needed_and_never_more_than_reserved(step: float, threads: int) -> None:
    auto = AutoWorkers(7)
    messages = _train(auto, 1000, a_thread=250, step=step)
    assert auto.threads == threads
    assert messages[0].startswith(f"loader workers: {threads} of 7 (auto): ")
    assert len(messages) == 1


def test_nothing_changes_before_two_windows_after_the_first_agree() -> None:
    auto = AutoWorkers(7)
    assert _train(auto, 41, a_thread=1000, step=1000) == []  # 4.1 s, of which the first 2 do not count
    assert auto.threads == 7
    assert len(_train(auto, 20, a_thread=1000, step=1000)) == 1
    assert auto.threads == 2


def test_a_pause_that_looks_like_a_slow_step_lowers_nothing() -> None:
    auto = AutoWorkers(7)
    _train(auto, 100, a_thread=200, step=1000)
    assert auto.threads == 7
    auto.add(BATCH, 0.5, 0.0, 30.0)  # a checkpoint
    assert _train(auto, 100, a_thread=200, step=1000) == []
    assert auto.threads == 7


def test_a_step_that_waits_gets_all_threads_back_at_once_and_so_few_are_not_tried_again() -> None:
    auto = AutoWorkers(7)
    _train(auto, 100, a_thread=500, step=1000)
    assert auto.threads == 3
    messages = _train(auto, 10, a_thread=500, step=1000, waits_with=3)
    assert messages == ["loader workers: 7 of 7 (auto): with 3 the step waited 9% of its time"]
    messages = _train(auto, 200, a_thread=500, step=1000, waits_with=3)
    assert messages == ["loader workers: 4 of 7 (auto): a thread decodes 500 images/s, a step takes 1,000"]
    assert auto.threads == 4


def test_files_that_get_harder_bring_the_threads_back() -> None:
    auto = AutoWorkers(7)
    _train(auto, 100, a_thread=1000, step=1000)
    assert auto.threads == 2
    _train(auto, 100, a_thread=200, step=1000)
    assert auto.threads == 7


def test_a_step_that_waits_with_all_threads_keeps_them() -> None:
    auto = AutoWorkers(2)
    messages = _train(auto, 200, a_thread=100, step=1000)
    assert messages == ["loader workers: 2 of 2 (auto): a thread decodes 100 images/s, a step takes 1,000"]
    assert auto.threads == 2


def test_batches_without_an_image_decide_nothing() -> None:
    auto = AutoWorkers(3)
    for _ in range(100):
        assert auto.add(0, 0.0, 0.0, 0.5) is None
    assert auto.threads == 3
