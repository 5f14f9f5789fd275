"""Which measurements were disturbed by who else was on the cluster, and what may have looked slow only for that.

Another tenant makes all slower that is measured meanwhile, some points more and some less. Where a point was measured several
times, a visit that took notably longer than its fastest one was disturbed. It also tells of its time: what was measured just
before or after, and only once, was perhaps disturbed too.

Shapes: O observations in the order of time, U points that were measured.
"""

from __future__ import annotations

import itertools
import math
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
SLOWER = 0.25  # mean of the logarithm by which a disturbed visit is slower
APART, MOST_OCCASIONS = 4, 3  # probes in between that make two visits two occasions; how many of them are sought


@dataclass(frozen=True)
class Disturbances:
    """Of O observations."""

    excess_O: Array  # of the logarithm of the step, to be taken off
    doubt_O: Array  # standard deviation of that
    known_O: Flags  # of points that were measured several times
    share: float  # of visits that are disturbed, as far as repeated ones tell

    @classmethod
    def of(cls, rows_O: Sequence[int], log_O: Array, noise_O: Array) -> Disturbances:
        """From the logarithms of the measured steps, and their noise; `rows_O` are the points."""
        count = len(rows_O)
        rows = np.asarray(rows_O, dtype=int)
        excess_O, doubt_O, known_O = np.zeros(count), np.zeros(count), np.zeros(count, dtype=bool)
        for row in np.unique(rows):
            visits: NDArray[np.int_] = np.flatnonzero(rows == row)
            if len(visits) < 2:
                continue
            known_O[visits] = True
            fastest = visits[np.argmin(log_O[visits] + noise_O[visits])]
            behind = log_O[visits] - log_O[fastest]
            sure = np.maximum(NOTABLE, SIGMAS * np.hypot(noise_O[visits], noise_O[fastest]))
            excess_O[visits] = np.where(behind > sure, behind, 0.0)
        doubt_O[known_O] = SHARED * excess_O[known_O]
        witnesses = np.flatnonzero(known_O)
        for place in np.flatnonzero(~known_O):
            before, after = witnesses[witnesses < place][-1:], witnesses[witnesses > place][:1]
            near = [witness for witness in (*before, *after) if abs(witness - place) <= NEAR]
            if near:
                excess_O[place] = doubt_O[place] = SHARED * float(np.mean(excess_O[near]))
        disturbed, repeats = int((excess_O[known_O] > 0).sum()), int(known_O.sum())
        return cls(excess_O, doubt_O, known_O, min((SHARE * WEIGHT + disturbed) / (WEIGHT + repeats), MOST_SHARE))

    @property
    def clean_O(self) -> Flags:
        """Those that nothing speaks against."""
        return np.asarray(self.excess_O == 0)


def undisturbed(
    disturbances: Disturbances,
    rows_U: NDArray[np.int_],
    at_O: NDArray[np.int_],
    log_O: Array,
    noise_O: Array,
    change_O: Array,
    cost_U: Array,
) -> Array:
    """The cost of points while nobody else is there, where somebody came and went; else as it is believed to be.

    What was measured at several times is as fast as its undisturbed visits. The others' belief (`cost_U`, of the mean state) is
    taken down by what that state costs: a point that looks good for this is measured once more before it is believed.
    `log_O` are costs as they were measured, `change_O` what the cluster's state is believed to have added to them.
    """
    switching = np.isin(at_O, at_O[disturbances.known_O & (disturbances.excess_O > 0)])
    if not switching.any():
        return cost_U
    usual = min(float(change_O[switching & disturbances.clean_O].mean()), 0.0)
    found = cost_U + usual
    for place, row in enumerate(rows_U.tolist()):
        visits = np.flatnonzero(at_O == row)
        clean = visits[disturbances.clean_O[visits]]
        if visits[-1] - visits[0] > APART or switching[visits].any():
            weights = 1 / noise_O[clean] ** 2
            found[place] = float(weights @ log_O[clean] / weights.sum())
    return found


def occasions(turns: Sequence[int]) -> int:
    """How many times, well apart, visits at these turns of the search stand for."""
    return 1 + sum(later - earlier > APART for earlier, later in itertools.pairwise(turns)) if turns else 0


def second_look(
    workers_U: Array, cost_U: Array, turns_U: Sequence[Sequence[int]], share: float, now: int
) -> list[tuple[int, float]]:
    """For each other number of workers than the best point's, its best point, and the gain that a second look may bring.

    The most first. `cost_U`: logarithms; `turns_U`: when each point was measured, disturbed visits left out. What was looked at
    just before `now` is left out: it would meet the same conditions.
    """
    best = int(np.argmin(cost_U))
    found = []
    for workers in np.unique(workers_U):
        if workers != workers_U[best]:
            having: NDArray[np.int_] = np.flatnonzero(workers_U == workers)
            candidate = int(having[np.argmin(cost_U[having])])
            behind = float(cost_U[candidate] - cost_U[best])
            turns = sorted(turn for index in having.tolist() for turn in turns_U[index])
            times = max(occasions(turns), len(turns_U[candidate]))
            if times < MOST_OCCASIONS and now - max(turns_U[candidate], default=-APART) > APART:
                found.append((candidate, share**times * SLOWER * math.exp(-behind / SLOWER)))
    return sorted(found, key=lambda pair: -pair[1])
