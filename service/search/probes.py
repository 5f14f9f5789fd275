"""How well a probe knows its mean step time, and when it may end."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def relative_error(steps_s: Sequence[float]) -> float:
    """Standard error of the mean step time, over that mean.

    Steps are not independent: a full prefetch queue hides a slow decode until it is empty, a hot GPU stays slow. The variance
    of the mean is that of independent steps times 1 + 2·Σ ρ_k, the sum ended at the first ρ_k below zero (Geyer 1992's
    initial positive sequence, without its pairs: probes are short) and at a third of the probe.
    Infinite for fewer than two steps.
    """
    times_S = np.asarray(steps_s, dtype=float)
    count = len(times_S)
    if count < 2:
        return math.inf
    mean = float(times_S.mean())
    off_S = times_S - mean
    variance = float(off_S @ off_S) / (count - 1)
    if variance <= 0 or mean <= 0:
        return 0.0
    stretch = 1.0
    for lag in range(1, count // 3 + 1):
        correlation = float(off_S[lag:] @ off_S[:-lag]) / (variance * (count - 1))
        if correlation <= 0:
            break
        stretch += 2 * correlation
    return math.sqrt(variance * stretch / count) / mean
