"""Which points may only look slow for the time at which they were measured."""

from collections.abc import Sequence

from service.search.suspects import MeasuredPoint, suspects


def suspected(
    cost_U: Sequence[float], turns_U: Sequence[Sequence[int]], workers_U: Sequence[float], batch_U: Sequence[float]
) -> list[tuple[int, float]]:
    """Ten turns, one each 100 s."""
    points = [
        MeasuredPoint((workers, 0), batch, cost, turns, turns[-1], 0.1)
        for cost, turns, workers, batch in zip(cost_U, turns_U, workers_U, batch_U, strict=True)
    ]
    return suspects(points, [100.0 * turn for turn in range(1, 11)])


def test_the_best_of_each_other_number_of_workers_is_measured_again_but_not_at_once() -> None:
    assert suspected([0.0, 0.1, 0.5], [[0], [1], [9]], [2, 16, 16], [8, 8, 8])[0][0] == 1
    assert suspected([0.0, 0.1, 0.5], [[0], [8], [9]], [2, 16, 16], [8, 8, 8]) == []


def test_a_group_that_was_measured_at_another_time_than_the_best_point_is_measured_again_sooner() -> None:
    ((_, at_the_time),) = suspected([0.0, 0.1], [[0], [1]], [2, 16], [8, 8])
    ((_, at_another),) = suspected([0.0, 0.1], [[9], [1]], [2, 16], [8, 8])
    assert at_another > 2 * at_the_time


def test_a_point_with_the_best_ones_workers_that_was_measured_at_another_time_is_measured_again_too() -> None:
    workers, batch = [2, 2, 2], [8, 8, 8]
    assert [row for row, _ in suspected([0.0, 0.1, 0.2], [[9], [1], [8]], workers, batch)] == [1]
    assert suspected([0.0, 0.1, 0.2], [[9], [7], [8]], workers, batch) == []  # all at about the same time
    assert suspected([0.0, 0.1, 0.2], [[9], [1], [2, 8]], workers, batch) == []  # another one is as fast now as it was then


def test_of_points_that_are_as_good_the_one_with_the_largest_batch_is_measured_again() -> None:
    assert suspected([0.0, 0.1, 0.11, 0.3], [[0], [1], [2], [3]], [2, 16, 16, 16], [8, 8, 32, 64])[0][0] == 2


def test_who_was_there_twice_may_be_there_again_but_less_likely() -> None:
    ((_, once),) = suspected([0.0, 0.1], [[0], [1]], [2, 16], [8, 8])
    ((_, twice),) = suspected([0.0, 0.1], [[0], [1, 4]], [2, 16], [8, 8])
    assert 0.1 * once < twice < 0.5 * once
