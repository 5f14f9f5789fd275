"""Which measurements were disturbed by who else was on the cluster, and what may have looked slow only for that.

Another tenant makes all slower that is measured meanwhile, some points more and some less. Where a point was measured several
times, a visit that took notably longer than its fastest one was disturbed. It is also evidence of its time: what was measured
just before or after, and only once, was perhaps disturbed too.

Shapes: O observations in the order of time, U points that were measured.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from service.search.points import Array, Flags

NOTABLE, SIGMAS = 0.12, 3.0  # relative: a difference of two visits to one point that neither heat nor the steps' noise explains
NEAR = 6  # probes between two measurements that may have met the same state of the cluster
SHARED = 0.5  # of a neighbour's disturbance that one expects of a measurement at its time, give or take as much
SHARE, WEIGHT = 0.1, 5.0  # of visits that are disturbed, before anything was measured twice; what that guess weighs, in visits
MOST_SHARE = 0.3
SLOWER = 0.5  # mean of the logarithm by which a disturbed visit is slower
PERSISTS = 0.3  # chance that who disturbed one occasion is there, or there again, at the next
EQUAL = 0.06  # points that differ by less are as good
APART = 4  # probes in between after which a visit is worth another one
OCCASION_S, MOST_OCCASIONS = 120.0, 3  # seconds in between that make two visits two occasions; how many of them are sought


@dataclass(frozen=True)
class Disturbances:
    """Of O observations."""

    excess_O: Array  # of the logarithm of the step, to be taken off
    doubt_O: Array  # standard deviation of that
    repeated_O: Flags  # of points that were measured several times
    switching_O: Flags  # of those of them that some visit found disturbed
    witnessed_O: Flags  # of a time at which another visit shows whether somebody was there

    @classmethod
    def of(cls, rows_O: Sequence[int], workers_O: Array, log_O: Array, noise_O: Array) -> Disturbances:
        """From the logarithms of the measured steps, and their noise; `rows_O` are the points.

        A point whose visits all agree is no evidence of its time: all of them may have been disturbed. What is known of their
        times from other points holds for all its visits alike, as for a point that was measured once. Workers fill nodes in one
        order: who disturbs few of them disturbs more of them too, and where many are alone fewer are.
        """
        rows = np.asarray(rows_O, dtype=int)
        excess_O, doubt_O = np.zeros(len(rows)), np.zeros(len(rows))
        repeated_O = np.isin(rows, [row for row, count in Counter(rows.tolist()).items() if count > 1])
        visits_of = [np.flatnonzero(rows == row) for row in np.unique(rows)]
        for visits in visits_of:
            excess_O[visits] = excess(log_O[visits], noise_O[visits])
        switching_O = np.isin(rows, rows[excess_O > 0])
        doubt_O[switching_O] = SHARED * excess_O[switching_O]
        found_O, witnessed_O = excess_O.copy(), switching_O.copy()
        for visits in visits_of:
            if not switching_O[visits[0]]:
                as_many_O = workers_O >= workers_O[visits[0]]
                evidence_O = switching_O & np.where(found_O > 0, workers_O <= workers_O[visits[0]], as_many_O)
                shared = _shared_excess(visits, np.flatnonzero(evidence_O), found_O)
                if shared is not None:
                    excess_O[visits] = doubt_O[visits] = shared
                    witnessed_O[visits] = True
        return cls(excess_O, doubt_O, repeated_O, switching_O, witnessed_O)

    @property
    def clean_O(self) -> Flags:
        """Those that nothing speaks against."""
        return np.asarray(self.excess_O == 0)

    def shares(self, workers_O: Array, workers_U: Array, ended_O: Array) -> Array:
        """Of occasions that are disturbed, for some numbers of workers, as far as repeated visits show; `ended_O`: seconds.

        A visit that nobody disturbed says so of the nodes that its workers were on: little of a point with more of them.
        """
        count = len(workers_O)
        disturbed_O = (self.switching_O & (self.excess_O > 0))[:count]
        clean_O = self.repeated_O[:count] & self.clean_O[:count]
        disturbed = occasions(ended_O[disturbed_O])
        clean_U = np.array([occasions(ended_O[clean_O & (workers_O >= workers)]) for workers in workers_U])
        return np.asarray(np.minimum((SHARE * WEIGHT + disturbed) / (WEIGHT + disturbed + clean_U), MOST_SHARE))


def excess(log_V: Array, noise_V: Array) -> Array:
    """By how much visits to one point are slower than its fastest one, where that is notable."""
    fastest = np.argmin(log_V + noise_V)
    behind_V = log_V - log_V[fastest]
    return np.where(behind_V > np.maximum(NOTABLE, SIGMAS * np.hypot(noise_V, noise_V[fastest])), behind_V, 0.0)


def _shared_excess(visits: NDArray[np.int_], witnesses: NDArray[np.int_], found_O: Array) -> float | None:
    """The excess that one expects of visits to one point that all agree, by what witnesses near them found; None: there are none.

    Either somebody was there on all of its occasions or on none, and the more they are the less likely is the former.
    """
    occasions = np.split(visits, np.flatnonzero(np.diff(visits) > NEAR) + 1)
    near = [[at for visit in occasion for at in _nearest(witnesses, int(visit))] for occasion in occasions]
    found = found_O[list(itertools.chain(*near))]
    if not len(found):
        return None
    if len(occasions) >= MOST_OCCASIONS or not found.any():
        return 0.0
    odds = 1.0
    for of_occasion in near:
        chance = SHARED * float((found_O[of_occasion] > 0).mean()) if of_occasion else SHARE
        odds *= chance / (1 - chance)
    expected = odds / (1 + odds) * float(found[found > 0].mean())
    return expected if len(occasions) == 1 or expected > NOTABLE else 0.0


def _nearest(witnesses: NDArray[np.int_], visit: int) -> list[int]:
    """The last one before and the first one after, as far as they are near."""
    before, after = witnesses[witnesses < visit][-1:], witnesses[witnesses > visit][:1]
    return [int(witness) for witness in (*before, *after) if abs(witness - visit) <= NEAR]


def undisturbed(
    disturbances: Disturbances,
    rows_U: NDArray[np.int_],
    at_O: NDArray[np.int_],
    workers_O: Array,
    log_O: Array,
    noise_O: Array,
    change_O: Array,
    cost_U: Array,
) -> Array:
    """The cost of points while nobody else is there, where somebody came and went; else as the posterior has it.

    What was measured while others were not disturbed, or at several times, is as fast as its undisturbed visits. The posterior of
    the others (`cost_U`, of the mean state) is taken down by what that state costs those that have as many workers: a point that
    looks good for this is measured once more before it is chosen.
    `log_O` are costs as they were measured, `change_O` what the cluster's state most likely has added to them.
    """
    switching_O = disturbances.switching_O
    if not switching_O.any():
        return cost_U
    usual = min(float(change_O[switching_O & disturbances.clean_O].mean()), 0.0)
    least = workers_O[switching_O].min()
    found = cost_U.copy()
    for index, row in enumerate(rows_U.tolist()):
        visits = np.flatnonzero(at_O == row)
        clean = visits[disturbances.clean_O[visits]]
        if len(clean) and (disturbances.witnessed_O[visits[0]] or visits[-1] - visits[0] > APART):
            weights = 1 / noise_O[clean] ** 2
            found[index] = float(weights @ log_O[clean] / weights.sum())
        elif workers_O[visits[0]] >= least:
            found[index] += usual
    return found


def occasions(ended_s: Sequence[float] | Array) -> int:
    """How many times, well apart, visits that ended at these times stand for."""
    return 1 + sum(later - earlier > OCCASION_S for earlier, later in itertools.pairwise(ended_s)) if len(ended_s) else 0


def second_look(
    groups_U: Sequence[tuple[float, int]],
    batch_U: Array,
    cost_U: Array,
    turns_U: Sequence[Sequence[int]],
    shares_U: Array,
    ended_s: Sequence[float],
) -> list[tuple[int, float]]:
    """For each other group of points than the best point's, its best point, and the gain that a second look may bring.

    The most first. A group are the points of one number of workers and one kind. `cost_U`: logarithms; `turns_U`: when each
    point was measured, disturbed visits left out; `ended_s`: when each turn ended. A group that was never measured at about the
    time of the best point may owe its place to the time alone. Of points that are as good, the one with the largest batch is
    looked at: it has most to gain where something that all share was slow. What was looked at just before is left out: it would
    meet the same conditions.
    """
    best, now = int(np.argmin(cost_U)), len(ended_s)
    found = []
    for group in dict.fromkeys(groups_U):
        if group == groups_U[best]:
            continue
        having: NDArray[np.int_] = np.array([index for index, other in enumerate(groups_U) if other == group])
        alike = having[cost_U[having] <= cost_U[having].min() + EQUAL]
        candidate = int(alike[np.argmax(batch_U[alike])])
        turns = sorted(turn for index in having.tolist() for turn in turns_U[index])
        times = occasions([ended_s[turn] for turn in turns])
        if times < MOST_OCCASIONS and now - max(turns_U[candidate], default=-APART) > APART:
            compared = any(abs(turn - other) < APART for turn in turns for other in turns_U[best])
            share = float(shares_U[candidate]) if compared else MOST_SHARE
            chance = share * PERSISTS ** (times - 1) if times else 1.0
            behind = float(cost_U[candidate] - cost_U[best])
            found.append((candidate, chance * SLOWER * math.exp(-behind / SLOWER)))
    return sorted(found, key=lambda pair: -pair[1])
