"""What a probe's steps say of the mean step time, how well, and when the probe may end.

Rare slow steps (a straggling worker, a checkpoint of a neighbour) decide the error of a short probe's mean: eight steps without
one look exact and too fast. How often and how slow is a matter of the cluster more than of the point, so a probe's own share of
slow steps is drawn to that of all probes by as many steps as the prior weighs (a shrinkage estimate: Efron and Morris 1973).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from service.search.points import Array

USUAL = 0.25  # steps within a quarter of the median are usual ones
PRIOR_STEPS = 40  # what the other probes weigh, in steps, where it is about slow steps
NOISE_STEPS = 20  # and where it is about the usual ones: they only ever make a probe's error larger
ALIKE = 0.15  # a probe whose slow steps add so much more or less than elsewhere (a starved queue's bursts) stands for itself


def relative_error(steps_s: Sequence[float] | Array) -> float:
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


@dataclass(frozen=True)
class MeanStepTime:
    """A mean step time and its relative standard error."""

    step_s: float
    error: float


@dataclass(frozen=True)
class SlowSteps:
    """What slow steps add to the mean over all probes: relative, and its standard deviation for one step."""

    added: float = 0.0
    spread: float = 0.0
    noise: float = 0.0  # of a usual step: relative, standard deviation, √count times that of a mean of so many

    @classmethod
    def of(cls, probes: Sequence[Sequence[float]]) -> SlowSteps:
        """Pooled over probes, each step counting the same; those that are mostly unusual steps, or a single one, are left out."""
        every = [np.asarray(steps_s, dtype=float) for steps_s in probes]
        usual = [(times_S, _usual(times_S)) for times_S in every]
        pairs = [(times_S, usual_S) for times_S, usual_S in usual if usual_S is not None and len(usual_S) > 1]
        if not pairs:
            return cls()
        ratio_S = np.concatenate([times_S / usual_S.mean() for times_S, usual_S in pairs])
        slow_S = np.where(np.abs(ratio_S - 1) > USUAL, ratio_S - 1, 0.0)
        noise = math.sqrt(float(np.mean([_variance(usual_S) for _, usual_S in pairs])))
        return cls(float(ratio_S.mean() - 1), float(slow_S.std()), noise)

    def mean(self, steps_s: Sequence[float] | Array) -> MeanStepTime:
        """A probe's mean, its slow steps weighed with those of all probes. Needs at least one step."""
        times_S = np.asarray(steps_s, dtype=float)
        plain = MeanStepTime(float(times_S.mean()), relative_error(times_S))
        usual_S = _usual(times_S)
        if usual_S is None or len(usual_S) < 2:
            return plain
        own = plain.step_s / float(usual_S.mean()) - 1
        if abs(own - self.added) > ALIKE:
            return plain
        count = len(times_S)
        added = (count * own + PRIOR_STEPS * self.added) / (count + PRIOR_STEPS)
        variance = _variance(usual_S)  # of few steps too small by chance: a slow spell may not have come yet
        variance = (count * variance + NOISE_STEPS * max(self.noise**2, variance)) / (count + NOISE_STEPS)
        error = math.hypot(math.sqrt(variance / len(usual_S)), self.spread * math.sqrt(count) / (count + PRIOR_STEPS))
        return MeanStepTime(float(usual_S.mean()) * (1 + added), error)


def _variance(times_S: Array) -> float:
    """Of one step, relative, as much of it as counts for a mean."""
    return relative_error(times_S) ** 2 * len(times_S)


def _usual(times_S: Array) -> Array | None:
    """The steps near the median; None where they are not the great majority."""
    usual_S = times_S[np.abs(times_S / np.median(times_S) - 1) <= USUAL]
    return usual_S if len(usual_S) >= 0.7 * len(times_S) else None
