"""Statistics for comparisons: Holm's correction and the paired t-test, both at the same level."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

ROUNDING = 1e-9
LEVEL = 0.05
"""Probability that any difference in a table is called significant by chance; confidence intervals have level 1 - LEVEL."""


def paired_t_test(differences: Sequence[float]) -> tuple[float, float, float] | None:
    """Run Student's t-test of differences against 0; None for fewer than two.

    Returns the mean, half the width of its confidence interval, and the two-sided p-value, which is NaN if all differences are
    equal but for rounding errors.
    """
    from scipy import stats  # takes half a second, and a table without seeds does not need it

    if len(differences) < 2:
        return None
    mean = float(np.mean(differences))
    if np.ptp(differences) <= ROUNDING:
        return mean, 0.0, np.nan
    test = stats.ttest_1samp(differences, 0.0)
    low, high = test.confidence_interval(1 - LEVEL)
    return mean, float(high - low) / 2, float(test.pvalue)


def holm(p_values: pd.Series) -> pd.Series:
    """Adjust p-values for the number of tests; NaN stays NaN.

    Holm 1979, "A simple sequentially rejective multiple test procedure": the smallest p-value is multiplied by the number of
    tests, the next by one less, and so on, and none becomes smaller than the one before it.
    """
    known = p_values.dropna().sort_values()
    return (known * np.arange(len(known), 0, -1)).clip(upper=1.0).cummax().reindex(p_values.index)
