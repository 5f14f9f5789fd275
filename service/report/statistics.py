"""The statistics of comparisons: Holm's correction and Student's t for paired differences, both at one level."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd

LEVEL = 0.05
"""Probability that any difference of a table is called significant by chance; 1 - LEVEL is that of confidence intervals."""


class PairedTest(NamedTuple):
    """A mean difference, half the width of its confidence interval, and the two-sided p-value."""

    mean: float
    half_width: float
    p_value: float
    """NaN: all differences are the same, so that the test says nothing."""


def paired_t_test(differences: Sequence[float], *, rounding: float = 0.0) -> PairedTest | None:
    """Student's t-test of differences against 0; None for fewer than two.

    Differences whose standard error is at most `rounding` count as all the same.
    """
    from scipy import stats  # takes half a second, which a table without seeds does not need

    if len(differences) < 2:
        return None
    mean = float(np.mean(differences))
    if float(stats.sem(differences)) <= rounding:
        return PairedTest(mean, 0.0, np.nan)
    test = stats.ttest_1samp(differences, 0.0)
    low, high = test.confidence_interval(1 - LEVEL)
    return PairedTest(mean, float(high - low) / 2, float(test.pvalue))


def holm(p_values: pd.Series) -> pd.Series:
    """The p-values adjusted for all tests being made; those that are missing stay so.

    Holm 1979, "A simple sequentially rejective multiple test procedure": the smallest counts as often as there are tests, the
    next for one test less, and none is smaller than the one before it.
    """
    known = p_values.dropna().sort_values()
    return (known * np.arange(len(known), 0, -1)).clip(upper=1.0).cummax().reindex(p_values.index)
