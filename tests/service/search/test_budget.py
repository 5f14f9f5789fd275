"""What a search may still cost, and what a probe counts."""

import numpy as np
import pytest

from service.search.budget import CONFIRM_SHARE, LEAST_SHARE, MAX_REPEATS_SHARE, MAX_SHARE, Budget


def test_a_probe_is_cheap_while_the_search_is() -> None:
    early, usual = (Budget(1000.0, spent, 0.0).price(10.0) for spent in (0.0, 200.0))
    assert early < usual == pytest.approx(0.01)


def test_what_is_within_a_share_of_a_lean_grid_counts_what_was_spent() -> None:
    cost_M = np.array([1.0, 1000 * LEAST_SHARE])
    assert Budget(1000.0, 0.0, 0.0).within(LEAST_SHARE, cost_M).tolist() == [True, False]
    assert Budget(1000.0, 200.0, 0.0).within(LEAST_SHARE, cost_M).tolist() == [False, False]
    assert Budget(1000.0, 200.0, 0.0).within(LEAST_SHARE, cost_M, more_gpu_s=200.0).tolist() == [True, False]


def test_nothing_is_left_once_the_most_was_spent() -> None:
    budget = Budget(1000.0, 1000 * MAX_SHARE, 0.0)
    assert budget.left_confirm_gpu_s == 0
    assert budget.left_gpu_s < 0


def test_the_last_of_it_is_kept_for_measuring_the_leading_points_again() -> None:
    budget = Budget(1000.0, 1000 * (MAX_SHARE - CONFIRM_SHARE), 0.0)
    assert budget.left_gpu_s == pytest.approx(0)
    assert budget.left_confirm_gpu_s == pytest.approx(1000 * CONFIRM_SHARE)
    assert Budget(1000.0, 300.0, 1000 * MAX_REPEATS_SHARE).left_repeats_gpu_s == 0
    assert Budget(1000.0, 300.0, 1000 * MAX_REPEATS_SHARE).left_confirm_gpu_s > 0
