"""Holm's correction and the paired t-test."""

import math

import pandas as pd
import pytest
from scipy import stats

from service.report.statistics import holm, paired_t_test


def test_holms_p_are_those_of_the_paper() -> None:
    assert holm(pd.Series([0.01, 0.04, None, 0.03, 0.005])).tolist() == pytest.approx(
        [0.03, 0.06, math.nan, 0.06, 0.02], nan_ok=True
    )
    assert holm(pd.Series([0.9, 0.8])).tolist() == [1.0, 1.0]
    assert holm(pd.Series(dtype=float)).empty


def test_the_paired_t_test_is_scipys() -> None:
    a, b = [71.2, 70.8, 71.9, 71.0], [70.1, 70.5, 70.9, 70.7]
    test, expected = paired_t_test([x - y for x, y in zip(a, b, strict=True)]), stats.ttest_rel(a, b)
    assert test is not None
    mean, half_width, p_value = test
    assert p_value == pytest.approx(expected.pvalue)
    low, high = expected.confidence_interval(0.95)
    assert (mean - half_width, mean + half_width) == pytest.approx((low, high))


def test_equal_differences_have_no_p_value_and_one_difference_no_test() -> None:
    test = paired_t_test([0.5, 0.5, 0.5])
    assert test is not None
    assert test[:2] == (0.5, 0.0)
    assert math.isnan(test[2])
    assert paired_t_test([0.5]) is None
