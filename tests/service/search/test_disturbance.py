"""Who else was on the cluster, from the times of points that were measured several times."""

import math

import numpy as np

from service.search.disturbance import Disturbances, occasions, undisturbed

NOISE = 0.01


def found(rows: list[int], workers: list[float], steps_s: list[float]) -> Disturbances:
    return Disturbances.of(rows, np.array(workers), np.log(steps_s), np.full(len(rows), NOISE))


def test_a_measurement_much_slower_than_the_fastest_to_its_point_was_disturbed() -> None:
    disturbances = found([0, 1, 0], [4, 4, 4], [1.0, 1.0, 1.5])
    assert disturbances.clean_O.tolist() == [True, False, False]  # the second one is near a disturbed one, and one alone
    assert disturbances.excess_O[2] > disturbances.excess_O[1] > 0


def test_a_point_whose_measurements_all_agree_was_not_alone_where_another_point_was_disturbed() -> None:
    rows, steps_s = [0, *range(2, 9), 1, 0, 1], [1.0] * 8 + [2.0, 1.6, 2.0]
    disturbances = found(rows, [4] * len(rows), steps_s)
    assert not disturbances.clean_O[8]
    assert not disturbances.clean_O[10]


def test_who_disturbs_many_workers_says_nothing_of_fewer() -> None:
    rows, steps_s = [0, 1, 0, 1], [1.0, 0.5, 1.6, 0.5]
    assert found(rows, [16, 2, 16, 2], steps_s).clean_O.tolist() == [True, True, False, True]
    assert found(rows, [2, 16, 2, 16], steps_s).clean_O.tolist() == [True, False, False, False]


def test_undisturbed_measurements_with_few_workers_say_nothing_of_more() -> None:
    disturbances = found([0] * 20, [2] * 20, [1.0] * 20)
    few, many = disturbances.shares(np.full(20, 2.0), np.array([2.0, 16.0]), 300.0 * np.arange(20))
    assert few < 0.03 < many == 0.1


def test_undisturbed_measurements_of_one_occasion_say_as_much_as_one() -> None:
    disturbances, at_once, one = found([0] * 20, [2] * 20, [1.0] * 20), np.zeros(20), np.array([2.0])
    assert disturbances.shares(np.full(20, 2.0), one, at_once) > 2 * disturbances.shares(
        np.full(20, 2.0), one, 300.0 * np.arange(20)
    )


def test_a_point_whose_measurements_agree_on_three_occasions_was_undisturbed() -> None:
    rows = [9, 0, *range(10, 16), 9, 0, *range(20, 26), 9, 0]
    steps_s = [1.0 if row != 0 else 0.5 for row in rows]
    steps_s[0] = steps_s[8] = 2.0  # somebody was there twice, and left before the end
    disturbances = found(rows, [4] * len(rows), steps_s)
    assert all(disturbances.clean_O[[1, 9, 17]])
    assert not found([0, 9, 9], [4] * 3, [0.5, 2.0, 1.0]).clean_O[0]


def test_a_point_that_is_as_fast_where_nobody_is_known_to_have_been_was_most_likely_undisturbed_before() -> None:
    rows = [9, 0, *range(10, 20), 0]
    steps_s = [2.0, 0.5, *[1.0] * 10, 0.5]
    assert found([*rows, *range(20, 30), 9], [4] * 24, [*steps_s, *[1.0] * 11]).clean_O[[1, 12]].all()


def test_a_point_is_as_fast_as_its_undisturbed_measurements_and_a_smaller_one_is_left_as_it_is() -> None:
    rows, workers = [0, 0, 1], [8.0, 8.0, 2.0]
    log_O = np.log([1.0, 1.6, 0.7])
    disturbances = Disturbances.of(rows, np.array(workers), log_O, np.full(3, NOISE))
    cost_U = undisturbed(
        np.array([0.2, math.log(0.7)]),
        disturbances,
        rows_U=np.array([0, 1]),
        rows_O=np.array(rows),
        workers_O=np.array(workers),
        log_O=log_O,
        noise_O=np.full(3, NOISE),
        change_O=np.array([-0.2, 0.2, 0.0]),
    )
    assert np.allclose(cost_U, np.log([1.0, 0.7]))


def test_measurements_within_two_minutes_are_one_occasion() -> None:
    assert [occasions(ended_s) for ended_s in ([], [5.0], [5.0, 100.0], [5.0, 100.0, 500.0])] == [0, 1, 1, 2]
