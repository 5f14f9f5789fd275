"""What the posterior says of each point, and when the leading ones are clear."""

import math
from collections import Counter

import numpy as np
import pytest
from scipy.special import ndtr

from service.search.confirmation import BestPointConfirmation
from service.search.fit_data import LEAST_NOISE
from service.search.points import Observation
from service.search.posterior import Posterior
from service.search.residual_model import OF_BATCH, REPEAT_SD, steps_apart
from service.search.state import SearchState
from tests.service.search.queues import ONE_NODE, grid, point

POINTS = grid([1, 2], [64, 128], [1, 4])


def measured(*pairs: tuple[int, float]) -> Posterior:
    """Of the first points of the grid: row and steady seconds of a step."""
    state = SearchState(POINTS, ONE_NODE)
    for row, step_s in pairs:
        state.add(POINTS[row], Observation("ok", [step_s] * 8))
    return state.posterior()


def test_the_bound_is_what_no_point_beats_the_best_by_but_with_the_doubt() -> None:
    posterior = measured((0, 0.2), (1, 0.1))
    ahead_SM, rest_M = posterior.ahead()
    one_M = np.arange(len(POINTS)) == 3
    bound = posterior.bound(one_M, np.ones(len(POINTS)), 0.05)
    assert bound > 0
    beats = posterior.weights_S @ ndtr((ahead_SM[:, 3] - math.log1p(bound)) / rest_M[3])
    assert beats == pytest.approx(0.05)
    assert posterior.bound(one_M, np.full(len(POINTS), 0.04), 0.05) == 0.0  # most likely it cannot run


def test_a_points_own_measurements_bound_its_cost() -> None:
    posterior = measured((0, 0.1), (0, 0.1), (1, 0.1))
    error = math.hypot(LEAST_NOISE, REPEAT_SD)
    own = posterior.own_most_U - posterior.offset_M[posterior.rows_U] - math.log(0.1)
    assert own.tolist() == pytest.approx([2 * error / math.sqrt(2), 2 * error])


def test_points_of_one_batch_size_share_what_the_next_size_does_not() -> None:
    layout = SearchState(POINTS, ONE_NODE).layout
    same, other = (layout.take([POINTS.index(at)]) for at in (point(1, 64, 4), point(1, 128, 4)))
    here = layout.take([POINTS.index(point(1, 64, 1))])
    assert steps_apart(here, same)[0, 0] - steps_apart(here, other)[0, 0] == pytest.approx(OF_BATCH**2)


def leaders(ahead_SC: list[list[float]], unverified: list[int]) -> BestPointConfirmation:
    rows = np.arange(len(ahead_SC[0]))
    return BestPointConfirmation(rows, np.array(ahead_SC), Counter([0, 0, 1]), Counter([0, 0, 1]), unverified)


def test_what_is_lost_by_taking_the_leader_is_the_mean_of_what_the_best_of_each_draw_is_ahead() -> None:
    assert leaders([[0.0, 0.1], [0.0, -1.0], [0.0, -1.0], [0.0, -1.0]], []).loss == pytest.approx(0.025)


def test_the_leaders_are_measured_again_until_they_are_confirmed_and_far_enough_apart() -> None:
    close, apart = [[0.0, 0.1], [0.0, -0.1]], [[0.0, -0.1], [0.0, -0.2]]
    assert leaders(close, []).candidates() == [1, 0]  # the one that was measured less often first
    assert not leaders(close, []).is_settled
    assert leaders(apart, []).is_settled
    assert not leaders(apart, [1]).is_settled
    assert leaders(apart, [1]).candidates() == [1]


def test_a_point_that_is_the_fastest_by_its_own_measurement_is_measured_again_whatever_the_model_says() -> None:
    posterior = measured((0, 0.2), (1, 0.1))
    assert BestPointConfirmation.of(posterior, [0, 0, 1, 1], [0, 0, 1, 1], (0,)).unverified == []
    assert BestPointConfirmation.of(posterior, [0, 1, 1], [0, 1], (0,)).unverified == [1]  # in front, and disturbed once
    posterior.cost_U[:] = posterior.own_most_U[1] + np.array([0.05, 0.1])  # now the model has the other one in front
    assert BestPointConfirmation.of(posterior, [0, 0, 1], [0, 0, 1], (0,)).unverified == [1]
    assert BestPointConfirmation.of(posterior, [0, 0, 1, 1], [0, 0, 1, 1], (0,)).unverified == []
