"""The values next to the best point's, so that a best point is one among measured neighbours and not the model's word alone.

Shapes: M points.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from service.search.points import Array, Flags, Layout

WITHIN = 0.35  # values that the model believes to be worse by more (in logarithms) are left alone
WORKERS_WITHIN = 0.6  # of workers, where a model is wrong by most; halving them at ideal speed-up loses log 2 and is left alone
ALIKE = 0.03  # a value is checked where a measured point with it is as close to the best point with it


def unchecked(layout: Layout, global_M: Array, value_M: Array, best: int, open_M: Flags, tried_M: Flags) -> Iterator[int]:
    """For each next value of each axis, the cheapest point with it (row), unless one about as good was measured.

    The next larger and smaller number of workers with whatever else is best there; with the best point's number of workers,
    the next batches and loader workers and every other value of each extra key. `value_M` is the logarithm of the cost.
    """
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
        place = int(np.searchsorted(values, axis_M[best]))
        for value in (*values[max(place - 1, 0) : place], *values[place + 1 : place + 2]):
            sides.append((among_M & (axis_M == value), within))
    for side_M, within in sides:
        usable_M = side_M & (open_M | tried_M)
        if not usable_M.any():
            continue
        least = float(value_M[usable_M].min())
        checked = bool((side_M & tried_M & (value_M <= least + ALIKE)).any())
        if not checked and least - value_M[best] < within:
            yield int(np.argmin(np.where(side_M & open_M, value_M, np.inf)))
