"""How well a probe knows its mean."""

import math

import numpy as np
import pytest

from service.search.step_time_statistics import SlowSteps, relative_error


def test_the_error_of_independent_steps_is_the_textbook_one() -> None:
    rng = np.random.default_rng(0)
    errors = [relative_error(rng.normal(1, 0.1, 25)) for _ in range(400)]
    assert np.median(errors) == pytest.approx(0.1 / 5, rel=0.25)


def test_steps_that_follow_each_other_know_their_mean_less_well() -> None:
    rng = np.random.default_rng(1)
    slow_S = np.repeat(rng.normal(1, 0.1, 10), 6)  # the same ten values, each six times
    mixed_S = rng.permutation(slow_S)
    assert relative_error(slow_S) > 1.5 * relative_error(mixed_S)


def test_one_step_knows_nothing_and_equal_steps_know_all() -> None:
    assert relative_error([0.1]) == math.inf
    assert relative_error([0.1] * 8) == 0.0


def test_short_probes_with_and_without_a_straggler_agree_better_once_their_slow_steps_are_pooled() -> None:
    rng = np.random.default_rng(2)
    probes = [rng.normal(1, 0.03, 12) * np.where(rng.random(12) < 0.1, 1.6, 1.0) for _ in range(60)]
    slow = SlowSteps.of(probes)
    assert slow.added == pytest.approx(0.06, abs=0.02)
    pooled = [slow.mean(probe).step_s for probe in probes]
    assert np.std(pooled) < 0.7 * np.std([probe.mean() for probe in probes])
    assert np.mean(pooled) == pytest.approx(1.06, abs=0.015)


def test_a_starved_queues_bursts_stand_for_themselves() -> None:
    slow = SlowSteps.of([[1.0] * 20] * 5)
    bursts = [0.1] * 9 + [2.0]
    assert slow.mean(bursts * 2).step_s == pytest.approx(np.mean(bursts))


def test_a_probe_of_one_step_says_nothing_of_the_others_noise() -> None:
    probes = [[1.0, 1.1, 0.9] * 4] * 3
    assert SlowSteps.of([*probes, [1.0]]) == SlowSteps.of(probes)


def test_the_error_of_a_pooled_mean_is_that_of_its_usual_steps_and_of_the_slow_ones_that_may_come() -> None:
    steps_s = [1.0, 1.1] * 10
    slow = SlowSteps(added=0.05, spread=0.2, noise=0.0)
    expected = math.hypot(relative_error(steps_s) * math.sqrt(20 / 40 + 20 / 40), 0.2 * math.sqrt(20) / 60)
    assert slow.mean(steps_s).error == pytest.approx(expected)
    assert slow.mean(steps_s).step_s == pytest.approx(1.05 * (1 + 40 * 0.05 / 60))
