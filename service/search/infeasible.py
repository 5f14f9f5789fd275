"""Which points are left alone for what others of them met: no room on the cluster, or a failure of unknown cause.

Failures also come by chance (a node that hiccups): one says little, and a point that failed once may be tried once more.

Shapes: M points.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from service.config.space import SCALE_AXES
from service.search.points import Flags, Layout, Observation, Point

FAILURES = 2  # of a point until it is given up; of different points with one value, nothing having run with it
RAN = ("ok", "oom")  # an OOM too had its room, and its code ran


def values(points: Sequence[Point]) -> list[Flags]:
    """For each value of each extra key, which points have it; without those that all have, which say nothing."""
    having: dict[tuple[str, str], Flags] = {}
    for row, point in enumerate(points):
        for key, value in point.items():
            if key not in SCALE_AXES:
                having.setdefault((key, repr(value)), np.zeros(len(points), dtype=bool))[row] = True
    return [having_M for having_M in having.values() if not having_M.all()]


def unschedulable(layout: Layout, history: Sequence[tuple[int, Observation]]) -> Flags:
    """Points that need at least as many workers and as many loader workers as one that had no room on the cluster.

    One that ran later though it needs as much says that the room has come back.
    """
    without_room_M = np.zeros(len(layout.workers_M), dtype=bool)
    for turn, (row, observation) in enumerate(history):
        if observation.status == "infeasible":
            as_much_M = (layout.workers_M >= layout.workers_M[row]) & (layout.threads_M >= layout.threads_M[row])
            if not as_much_M[[later for later, other in history[turn:] if other.status in RAN]].any():
                without_room_M |= as_much_M
    return without_room_M


def lost(layout: Layout, history: Sequence[tuple[int, Observation]]) -> Flags:
    """Points that may have run once but most likely cannot now.

    Where a point has no room although one that needs as much ran before, nodes have gone, and with them their workers,
    however few loader workers they have.
    """
    lost_M = unschedulable(layout, history)
    for turn, (row, observation) in enumerate(history):
        if observation.status == "infeasible":
            more_M = layout.workers_M >= layout.workers_M[row]
            as_much_M = more_M & (layout.threads_M >= layout.threads_M[row])
            before, after = ([at for at, other in part if other.status in RAN] for part in (history[:turn], history[turn:]))
            if as_much_M[before].any() and not more_M[after].any():
                lost_M |= more_M
    return lost_M


def failing(layout: Layout, values: Sequence[Flags], history: Sequence[tuple[int, Observation]]) -> Flags:
    """Points that failed twice and never worked, and all that have in common what several of those that failed have.

    That is one of `values`, or a number of workers and all above it, with which two points failed and none ever worked.
    Points that failed may have several things in common. As long as another one explains the same failures, only what has
    both is left alone.
    """
    counts = Counter(row for row, observation in history if observation.status == "failed")
    worked = [row for row, observation in history if observation.status in RAN]
    failed = [row for row in counts if row not in worked]
    tried, points = np.unique(layout.workers_M[failed], return_counts=True)
    sizes = [layout.workers_M >= workers for workers in tried[points >= FAILURES]]
    suspects: list[tuple[frozenset[int], Flags]] = []
    for having_M in (*values, *sizes):
        failures = frozenset(row for row in failed if having_M[row])
        if len(failures) >= FAILURES and not having_M[worked].any():
            suspects.append((failures, having_M))
    failing_M = np.zeros(len(layout.workers_M), dtype=bool)
    failing_M[[row for row in failed if counts[row] >= FAILURES]] = True
    for failures, _ in suspects:
        failing_M |= np.all(np.stack([having_M for others, having_M in suspects if failures <= others]), axis=0)
    return failing_M
