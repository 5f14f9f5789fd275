"""Whether a published accuracy was reached: mean and deviation over seeds, and the tolerance of the difference."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Outcome = Literal["pass", "fail", "unfinished", "not comparable", "-"]


@dataclass(frozen=True)
class MeanAccuracy:
    """Over `num` runs, in percent. `std` is the sample's deviation (n − 1); None of a single run."""

    value: float
    std: float | None
    num: int

    @classmethod
    def of(cls, values: Sequence[float]) -> MeanAccuracy | None:
        """None of nothing."""
        if not values:
            return None
        return cls(statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, len(values))


@dataclass(frozen=True)
class Verdict:
    """A published accuracy and ours."""

    published: float
    ours: MeanAccuracy | None
    tolerance: float | None
    outcome: Outcome

    @property
    def difference(self) -> float | None:
        """Ours less the published one."""
        return self.ours.value - self.published if self.ours else None


def tolerance(ours: MeanAccuracy, num_published: int, least: float) -> float:
    """Points by which a mean over seeds may be off: 2·s·√(1/n + 1/m), at least `least` and at most twice that.

    That is two standard errors of the difference of the two means, with our deviation s for both, n our runs and m theirs. Papers
    seldom give a deviation; `least` is for differences that seeds do not show, such as another library's. The upper bound keeps
    runs that scatter widely from passing for it.
    """
    if ours.std is None:
        return least
    return min(max(least, 2 * ours.std * math.sqrt(1 / ours.num + 1 / num_published)), 2 * least)


def compare_accuracy(
    published: float, finished: Sequence[float], *, num_published: int, min_tolerance: float, num_seeds: int, comparable: bool
) -> Verdict:
    """A published accuracy, the mean of `num_published` runs, and ours, in percent, of each seed that has `finished`.

    It passes where |mean − published| ≤ `tolerance`: what is far above was not reproduced either.
    """
    ours = MeanAccuracy.of(finished)
    if ours is None:
        return Verdict(published, None, None, "-")
    allowed = tolerance(ours, num_published, min_tolerance)
    outcome: Outcome = "pass" if abs(ours.value - published) <= allowed else "fail"
    if not comparable:
        outcome = "not comparable"
    elif ours.num < num_seeds:
        outcome = "unfinished"
    return Verdict(published, ours, allowed, outcome)
