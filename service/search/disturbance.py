"""Which measurements were disturbed by who else was on the cluster, and what may have looked slow only for that.

Another tenant makes all slower that is measured meanwhile, some points more and some less. Where a point was measured several
times, a measurement that took notably longer than the fastest was disturbed. It is also evidence of its time: what was measured
just before or after, and only once, was perhaps disturbed too.

Shapes: O observations in the order of time, U points that were measured.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from service.search.points import Array, Flags

NOTABLE_EXCESS, NOTABLE_SDS = 0.12, 3.0  # relative, and in standard deviations: more than heat and the steps' noise make
NEAR_PROBES = 6  # between two measurements that may have met the same state of the cluster
SHARED_EXCESS = 0.5  # of a neighbour's excess that one expects of a measurement at its time, give or take as much
DISTURBED_SHARE, SHARE_WEIGHT = 0.1, 5.0  # of occasions, before anything was measured twice; occasions that this guess weighs
MAX_DISTURBED_SHARE = 0.3
APART_PROBES = 4  # in between, after which a measurement is worth another one
OCCASION_GAP_S, MAX_OCCASIONS = 120.0, 3  # in between that makes two measurements two occasions; how many are looked for


@dataclass(frozen=True)
class Disturbances:
    """Of O observations."""

    excess_O: Array  # of the logarithm of the step, to be taken off
    doubt_O: Array  # standard deviation of that
    repeated_O: Flags  # of points that were measured several times
    switching_O: Flags  # of those of them that were disturbed at least once
    witnessed_O: Flags  # of a time at which another measurement shows whether somebody was there

    @classmethod
    def of(cls, rows_O: Sequence[int], workers_O: Array, log_O: Array, noise_O: Array) -> Disturbances:
        """From the logarithms of the measured steps, and their noise; `rows_O` are the points.

        A point whose measurements all agree is no evidence of its time: all of them may have been disturbed. What is known of
        their times from other points holds for all of them alike. Workers fill nodes in one order: who disturbs few of them
        disturbs more of them too, and where many are alone fewer are.
        """
        rows = np.asarray(rows_O, dtype=int)
        excess_O, doubt_O = np.zeros(len(rows)), np.zeros(len(rows))
        repeated_O = np.isin(rows, [row for row, count in Counter(rows.tolist()).items() if count > 1])
        repeats_of = [np.flatnonzero(rows == row) for row in np.unique(rows)]
        for repeats in repeats_of:
            excess_O[repeats] = excess(log_O[repeats], noise_O[repeats])
        switching_O = np.isin(rows, rows[excess_O > 0])
        doubt_O[switching_O] = SHARED_EXCESS * excess_O[switching_O]
        found_O, witnessed_O = excess_O.copy(), switching_O.copy()
        for repeats in repeats_of:
            if not switching_O[repeats[0]]:
                as_many_O = workers_O >= workers_O[repeats[0]]
                evidence_O = switching_O & np.where(found_O > 0, workers_O <= workers_O[repeats[0]], as_many_O)
                shared = _shared_excess(repeats, np.flatnonzero(evidence_O), found_O)
                if shared is not None:
                    excess_O[repeats] = doubt_O[repeats] = shared
                    witnessed_O[repeats] = True
        return cls(excess_O, doubt_O, repeated_O, switching_O, witnessed_O)

    @property
    def clean_O(self) -> Flags:
        """Those that nothing speaks against."""
        return np.asarray(self.excess_O == 0)

    def shares(self, workers_O: Array, workers_U: Array, ended_O: Array) -> Array:
        """Of occasions that are disturbed, for some numbers of workers, as far as repeats show; `ended_O`: seconds.

        A measurement that nobody disturbed says so of the nodes that its workers were on: little of a point with more of them.
        """
        count = len(workers_O)
        disturbed_O = (self.switching_O & (self.excess_O > 0))[:count]
        clean_O = self.repeated_O[:count] & self.clean_O[:count]
        disturbed = occasions(ended_O[disturbed_O])
        clean_U = np.array([occasions(ended_O[clean_O & (workers_O >= workers)]) for workers in workers_U])
        share_U = (DISTURBED_SHARE * SHARE_WEIGHT + disturbed) / (SHARE_WEIGHT + disturbed + clean_U)
        return np.asarray(np.minimum(share_U, MAX_DISTURBED_SHARE))


def excess(log_R: Array, noise_R: Array) -> Array:
    """By how much measurements of one point are slower than the fastest of them, where that is notable."""
    fastest = np.argmin(log_R + noise_R)
    behind_R = log_R - log_R[fastest]
    return np.where(behind_R > np.maximum(NOTABLE_EXCESS, NOTABLE_SDS * np.hypot(noise_R, noise_R[fastest])), behind_R, 0.0)


def _shared_excess(repeats: NDArray[np.int_], witnesses: NDArray[np.int_], found_O: Array) -> float | None:
    """The excess that one expects of measurements of a point that all agree, by what witnesses near them found, if any.

    Either somebody was there on all of its occasions or on none, and the more they are the less likely is the former.
    """
    by_occasion = np.split(repeats, np.flatnonzero(np.diff(repeats) > NEAR_PROBES) + 1)
    near = [[at for repeat in occasion for at in _nearest(witnesses, int(repeat))] for occasion in by_occasion]
    found = found_O[list(itertools.chain(*near))]
    if not len(found):
        return None
    if len(by_occasion) >= MAX_OCCASIONS or not found.any():
        return 0.0
    odds = 1.0
    for of_occasion in near:
        chance = SHARED_EXCESS * float((found_O[of_occasion] > 0).mean()) if of_occasion else DISTURBED_SHARE
        odds *= chance / (1 - chance)
    expected = odds / (1 + odds) * float(found[found > 0].mean())
    return expected if len(by_occasion) == 1 or expected > NOTABLE_EXCESS else 0.0


def _nearest(witnesses: NDArray[np.int_], repeat: int) -> list[int]:
    """The last one before and the first one after, as far as they are near."""
    before, after = witnesses[witnesses < repeat][-1:], witnesses[witnesses > repeat][:1]
    return [int(witness) for witness in (*before, *after) if abs(witness - repeat) <= NEAR_PROBES]


def undisturbed(
    cost_U: Array,
    disturbances: Disturbances,
    *,
    rows_U: NDArray[np.int_],
    rows_O: NDArray[np.int_],
    workers_O: Array,
    log_O: Array,
    noise_O: Array,
    change_O: Array,
) -> Array:
    """The cost of points while nobody else is there, where somebody came and went; else `cost_U`, that of the mean state.

    What was measured while others were not disturbed, or at several times, is as fast as its undisturbed measurements. The cost
    of the others is taken down by what the mean state costs those that have as many workers: a point that looks good for this is
    measured once more before it is chosen.
    `rows_O` are the points of the observations, `log_O` their costs as measured, `change_O` what the cluster's state most likely
    has added to them.
    """
    switching_O = disturbances.switching_O
    if not switching_O.any():
        return cost_U
    usual = min(float(change_O[switching_O & disturbances.clean_O].mean()), 0.0)
    least = workers_O[switching_O].min()
    found = cost_U.copy()
    for index, row in enumerate(rows_U.tolist()):
        repeats = np.flatnonzero(rows_O == row)
        clean = repeats[disturbances.clean_O[repeats]]
        if len(clean) and (disturbances.witnessed_O[repeats[0]] or repeats[-1] - repeats[0] > APART_PROBES):
            weights = 1 / noise_O[clean] ** 2
            found[index] = float(weights @ log_O[clean] / weights.sum())
        elif workers_O[repeats[0]] >= least:
            found[index] += usual
    return found


def occasions(ended_s: Sequence[float] | Array) -> int:
    """How many times, well apart, measurements that ended at these times stand for."""
    return 1 + sum(later - earlier > OCCASION_GAP_S for earlier, later in itertools.pairwise(ended_s)) if len(ended_s) else 0
