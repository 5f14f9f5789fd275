"""The values next to the best point's, so that a best point is compared with measured neighbours and not with predictions alone.

Shapes: M points.
"""

from collections.abc import Iterator

import numpy as np

from service.search.points import Array, Flags, Layout
from service.search.posterior import Posterior

MAX_LOSS = 0.35  # values that are predicted to be worse by more (logarithm of the cost) are not checked
WORKERS_MAX_LOSS = 0.6  # of workers, where a model is wrong by most; halving them at ideal speed-up loses log 2 and is left alone
GOOD_FIT = 0.04  # amplitude of the residuals up to which predictions are trusted
EQUAL_LOSS = 0.03  # a value is checked where a measured point with it is as close to the best point with it


def unchecked_neighbours(
    layout: Layout, global_M: Array, posterior: Posterior, best: int, open_M: Flags, tried_M: Flags, margin: float = 0.0
) -> Iterator[int]:
    """For each next value of each axis, the cheapest point with it (row), unless one about as good was measured.

    The next larger and smaller number of workers with whatever else is best there; with the best point's number of workers,
    the next batches and loader workers, and every other value of each extra key. Where the model leaves much unexplained, or with
    a `margin` (logarithm of the cost), worse predictions are checked too, and all values of the axes are neighbours.
    """
    value_M = posterior.value_M
    distrust = 5 * max(posterior.amplitude - GOOD_FIT, 0.0) + margin
    here_M = layout.workers_M == layout.workers_M[best]
    sides = [(here_M & (member_M != member_M[best]), MAX_LOSS) for member_M in layout.member_KM]
    anywhere_M = np.ones_like(here_M)
    axes = (
        (layout.workers_M, anywhere_M, WORKERS_MAX_LOSS),
        (global_M, here_M, MAX_LOSS),
        (layout.threads_M, here_M, MAX_LOSS),
    )
    for axis_M, among_M, max_loss in axes:
        values = np.unique(axis_M[among_M])
        index = int(np.searchsorted(values, axis_M[best]))
        reach = len(values) if distrust else 1
        for value in (*values[max(index - reach, 0) : index], *values[index + 1 : index + 1 + reach]):
            sides.append((among_M & (axis_M == value), max_loss))
    for side_M, max_loss in sides:
        usable_M = side_M & (open_M | tried_M)
        if not usable_M.any():
            continue
        least = float(value_M[usable_M].min())
        checked = bool((side_M & tried_M & (value_M <= least + EQUAL_LOSS)).any())
        if not checked and least - value_M[best] < max_loss + distrust:
            yield int(np.argmin(np.where(side_M & open_M, value_M, np.inf)))
