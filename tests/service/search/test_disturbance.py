"""Who else was on the cluster, from the times of points that were measured several times."""

from __future__ import annotations

import math

import numpy as np

from service.search.disturbance import Disturbances, occasions, second_look, undisturbed

NOISE = 0.01


def found(rows: list[int], workers: list[float], steps_s: list[float]) -> Disturbances:
    return Disturbances.of(rows, np.array(workers), np.log(steps_s), np.full(len(rows), NOISE))


def test_a_visit_much_slower_than_the_fastest_to_its_point_was_disturbed() -> None:
    disturbances = found([0, 1, 0], [4, 4, 4], [1.0, 1.0, 1.5])
    assert disturbances.clean_O.tolist() == [True, False, False]  # the second one is near a disturbed visit, and one alone
    assert disturbances.excess_O[2] > disturbances.excess_O[1] > 0


def test_a_point_whose_visits_all_agree_was_not_alone_where_another_point_was_disturbed() -> None:
    rows, steps_s = [0, *range(2, 9), 1, 0, 1], [1.0] * 8 + [2.0, 1.6, 2.0]
    disturbances = found(rows, [4] * len(rows), steps_s)
    assert not disturbances.clean_O[8]
    assert not disturbances.clean_O[10]


def test_who_disturbs_many_workers_says_nothing_of_fewer() -> None:
    rows, steps_s = [0, 1, 0, 1], [1.0, 0.5, 1.6, 0.5]
    assert found(rows, [16, 2, 16, 2], steps_s).clean_O.tolist() == [True, True, False, True]
    assert found(rows, [2, 16, 2, 16], steps_s).clean_O.tolist() == [True, False, False, False]


def test_undisturbed_visits_with_few_workers_say_nothing_of_more() -> None:
    disturbances = found([0] * 20, [2] * 20, [1.0] * 20)
    few, many = disturbances.shares(np.full(20, 2.0), np.array([2.0, 16.0]))
    assert few < 0.03 < many == 0.1


def test_a_point_is_as_fast_as_its_undisturbed_visits_and_a_smaller_one_is_left_as_it_is() -> None:
    rows, workers = [0, 0, 1], [8.0, 8.0, 2.0]
    log_O = np.log([1.0, 1.6, 0.7])
    disturbances = Disturbances.of(rows, np.array(workers), log_O, np.full(3, NOISE))
    cost_U = undisturbed(
        disturbances,
        np.array([0, 1]),
        np.array(rows),
        np.array(workers),
        log_O,
        np.full(3, NOISE),
        np.array([-0.2, 0.2, 0.0]),
        np.array([0.2, math.log(0.7)]),
    )
    assert np.allclose(cost_U, np.log([1.0, 0.7]))


def test_the_best_of_each_other_number_of_workers_is_looked_at_again_but_not_at_once() -> None:
    workers_U, cost_U, shares_U = np.array([2.0, 16.0, 16.0]), np.array([0.0, 0.1, 0.5]), np.array([0.02, 0.1, 0.1])
    ended_s = [10.0 * turn for turn in range(1, 11)]
    assert second_look(workers_U, cost_U, [[0], [1], [9]], shares_U, ended_s)[0][0] == 1
    assert second_look(workers_U, cost_U, [[0], [8], [9]], shares_U, ended_s) == []


def test_visits_within_two_minutes_are_one_occasion() -> None:
    assert [occasions(ended_s) for ended_s in ([], [5.0], [5.0, 100.0], [5.0, 100.0, 500.0])] == [0, 1, 1, 2]
