"""The front of speed against cost, and which measured point an untested one has to beat to move it.

Speed is images a second, cost GPU-seconds an epoch; the data set being fixed, n workers that take t for an image cost n·t. So
the fastest point of each number of workers is also its cheapest, and the front is those that no other one beats in both.

Shapes: M points, O measured ones.
"""

import numpy as np
from numpy.typing import NDArray

from service.search.points import Array

Rows = NDArray[np.int_]


def behind(workers_M: Array, workers_O: Array) -> Array:
    """What a measured point's time counts more, in logarithms, compared with a point of M: OM.

    More workers have to make up for their cost; fewer that are as fast are better in both.
    """
    return np.asarray(np.maximum(np.log(workers_O)[:, None] - np.log(workers_M), 0.0))


def incumbents(workers_M: Array, workers_O: Array, time_O: Array) -> tuple[Rows, Array]:
    """For each of M the index of the measured point that keeps it off the front, and what that one's time counts more.

    `time_O` is the logarithm of the time for an image. A point that is faster than that moves the front by as much: it is
    faster than every measured point that is not dearer, and cheaper than every one that is not slower, by that share.
    """
    behind_OM = behind(workers_M, workers_O)
    incumbent_M = np.argmin(time_O[:, None] + behind_OM, axis=0)
    return incumbent_M, behind_OM[incumbent_M, np.arange(len(workers_M))]


def front(workers_O: Array, time_O: Array) -> list[int]:
    """Indices of the points that no other one beats in speed and cost, the fewest workers first."""
    incumbent_O, _ = incumbents(workers_O, workers_O, time_O)
    return sorted({int(index) for index in np.flatnonzero(incumbent_O == np.arange(len(time_O)))}, key=lambda o: workers_O[o])
