"""The values next to the best point's, so that a best point is one among measured neighbours and not the model's word alone.

Shapes: M points.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from service.search.points import Array, Flags, Layout
from service.search.posterior import Posterior

WITHIN = 0.35  # values that the model believes to be worse by more (in logarithms) are left alone
WORKERS_WITHIN = 0.6  # of workers, where a model is wrong by most; halving them at ideal speed-up loses log 2 and is left alone
GOOD_FIT = 0.04  # amplitude of the residuals up to which the model is taken at its word
ALIKE = 0.03  # a value is checked where a measured point with it is as close to the best point with it


def unchecked(
    layout: Layout, global_M: Array, posterior: Posterior, best: int, open_M: Flags, tried_M: Flags, farther: float = 0.0
) -> Iterator[int]:
    """For each next value of each axis, the cheapest point with it (row), unless one about as good was measured.

    The next larger and smaller number of workers with whatever else is best there; with the best point's number of workers,
    the next batches and loader workers and every other value of each extra key. Where the model leaves much unexplained, its
    word that a neighbour is worse counts less, and all values of the axes are neighbours. So they are with `farther`, by which
    the model's word counts less too.
    """
    value_M = posterior.value_M
    distrust = 5 * max(posterior.amplitude - GOOD_FIT, 0.0) + farther
    here_M = layout.workers_M == layout.workers_M[best]
    sides = [(here_M & (member_M != member_M[best]), WITHIN) for member_M in layout.member_KM]
    anywhere_M = np.ones_like(here_M)
    axes = (
        (layout.workers_M, anywhere_M, WORKERS_WITHIN),
        (global_M, here_M, WITHIN),
        (layout.threads_M, here_M, WITHIN),
    )
    for axis_M, among_M, within in axes:
        values = np.unique(axis_M[among_M])
        index = int(np.searchsorted(values, axis_M[best]))
        reach = len(values) if distrust else 1
        for value in (*values[max(index - reach, 0) : index], *values[index + 1 : index + 1 + reach]):
            sides.append((among_M & (axis_M == value), within))
    for side_M, within in sides:
        usable_M = side_M & (open_M | tried_M)
        if not usable_M.any():
            continue
        least = float(value_M[usable_M].min())
        checked = bool((side_M & tried_M & (value_M <= least + ALIKE)).any())
        if not checked and least - value_M[best] < within + distrust:
            yield int(np.argmin(np.where(side_M & open_M, value_M, np.inf)))
