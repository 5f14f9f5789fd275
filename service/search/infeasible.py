"""Which points most likely cannot run for what others of them met: no room on the cluster, or a failure of unknown cause.

Failures also come by chance (a node that hiccups): one says little, and what failed is tried again where that may be worth it.

Shapes: M points, S sets of values.
"""

from collections import Counter
from collections.abc import Sequence
from itertools import combinations

import numpy as np

from service.config.space import SCALE_AXES
from service.search.points import Array, Flags, Layout, Observation, Point

ALWAYS_FAILS = 0.02  # probability of a value, or of a point, before anything is measured; see `chances_after_failures`
FAILS_BY_CHANCE = 0.05  # of a probe that should run
MAX_BROKEN = 3  # values that are broken at once
MAX_SUSPECTS = 12  # of which sets are weighed: those that explain most of the failures
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


def lost_with_nodes(layout: Layout, history: Sequence[tuple[int, Observation]]) -> Flags:
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


def chances_after_failures(layout: Layout, values: Sequence[Flags], history: Sequence[tuple[int, Observation]]) -> Array:
    """The probability that each point can run, as far as failures of unknown cause tell.

    A probe fails by chance, or for something that its point has: one of `values`, or a number of workers and all above it. What
    something else ran with is not broken. Each set of what may be broken is weighed by how likely it makes the failures (Bayes):
    of two causes that explain the same failures neither is sure, and what has both most likely fails.
    """
    counts = Counter(row for row, observation in history if observation.status == "failed")
    worked = [row for row, observation in history if observation.status in RAN]
    failed = [row for row in counts if row not in worked]
    sizes = [layout.workers_M >= workers for workers in np.unique(layout.workers_M[failed])]
    suspects = [having_M for having_M in (*values, *sizes) if having_M[failed].any() and not having_M[worked].any()]
    suspects = sorted(suspects, key=lambda having_M: -int(having_M[failed].sum()))[:MAX_SUSPECTS]
    sets = [broken for size in range(min(len(suspects), MAX_BROKEN) + 1) for broken in combinations(suspects, size)]
    having_SM = np.array([np.any([np.zeros(len(layout.workers_M), dtype=bool), *broken], axis=0) for broken in sets])
    sizes_S, explained_S = np.array([len(broken) for broken in sets]), having_SM[:, failed].sum(axis=1)
    log_weight_S = sizes_S * np.log(ALWAYS_FAILS) - explained_S * np.log(FAILS_BY_CHANCE)
    weight_S = np.exp(log_weight_S - log_weight_S.max())
    chance_M = 1 - weight_S @ having_SM / weight_S.sum()
    for row in failed:
        chance_M[row] /= 1 + ALWAYS_FAILS / FAILS_BY_CHANCE ** min(counts[row], 100)  # beyond that a float overflows
    return np.asarray(chance_M)
