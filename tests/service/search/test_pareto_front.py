"""The front of speed and cost."""

import math

import numpy as np
import pytest

from service.search.pareto_front import behind, front, incumbents

WORKERS = np.array([1.0, 2.0, 4.0])


def test_more_workers_have_to_make_up_for_their_cost_and_fewer_do_not() -> None:
    (row,) = behind(WORKERS, np.array([2.0])).tolist()
    assert row == pytest.approx([math.log(2), 0.0, 0.0])


def test_a_point_is_off_the_front_where_another_is_faster_or_cheaper_by_as_much() -> None:
    time_O = np.log([4.0, 2.1, 1.5])
    assert front(WORKERS, time_O) == [0, 1, 2]
    assert front(WORKERS, np.log([4.0, 4.1, 1.5])) == [0, 2]
    incumbent_M, penalty_M = incumbents(WORKERS, WORKERS, np.log([4.0, 4.1, 1.5]))
    assert incumbent_M.tolist() == [0, 2, 2]
    assert penalty_M.tolist() == pytest.approx([0.0, math.log(2), 0.0])
