"""Which of the leading points to measure again before one of them is called the best.

One probe may have been lucky, or older than a change of the cluster. The leaders are measured in turn, and so under about the
same conditions, until what is lost by taking the one in front is immaterial, or not worth another probe.

Shapes: C leading points, S draws.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from service.search.pareto_front import Rows
from service.search.points import Array
from service.search.posterior import Posterior

NUM_LEADERS = 4  # that are compared; the fourth hardly ever wins
NEGLIGIBLE_LOSS = 0.01  # expected at which it does not matter which one is taken
MIN_CLEAN, MAX_CLEAN = 2, 5  # undisturbed measurements that the one in front needs; of any
MAX_REPEATS = 12  # of one point, while somebody else stays on the cluster
MAX_FAILED = 2  # probes of one point, after which it is not measured again


@dataclass(frozen=True)
class BestPointConfirmation:
    """How the leaders stand."""

    rows_C: Rows  # the one in front first
    ahead_SC: Array  # draws of what each of them is better by than the one in front, relative
    counts: Counter[int]  # measurements, by row
    clean: Counter[int]  # of those, the ones that nobody disturbed
    unverified: list[int]  # those in front, by model and measurements or by their own measurements alone, that were not confirmed

    @classmethod
    def of(cls, posterior: Posterior, rows: Sequence[int], clean: Sequence[int], seed: Sequence[int]) -> BestPointConfirmation:
        """`rows` of the measurements so far, `clean` are those that were not disturbed."""
        rows_C = posterior.leaders(NUM_LEADERS)
        rows_C = rows_C[np.isfinite(posterior.cost_U[np.argsort(posterior.cost_U, kind="stable")[:NUM_LEADERS]])]
        cost_SC, counts, confirmed = posterior.among(rows_C, np.random.default_rng(seed)), Counter(rows), Counter(clean)
        first = [int(rows_C[0])]
        # What the model puts down to the time of its measurements may be the point's own: that is seen at another time.
        if posterior.own_most_U.min() < posterior.cost_U.min():
            first.append(int(posterior.rows_U[np.argmin(posterior.own_most_U)]))
        unverified = [row for row in dict.fromkeys(first) if confirmed[row] < MIN_CLEAN and counts[row] < MAX_REPEATS]
        return cls(rows_C, cost_SC[:, :1] - cost_SC, counts, confirmed, unverified)

    @property
    def loss(self) -> float:
        """Expected, of taking the one in front; relative."""
        return float(self.ahead_SC.max(axis=1).mean())

    @property
    def is_settled(self) -> bool:
        """Whether those in front were confirmed, and what may be lost by taking the first is negligible."""
        return self.loss <= NEGLIGIBLE_LOSS and not self.unverified

    def candidates(self) -> list[int]:
        """Those that another measurement may say something about, the most useful first."""
        if self.unverified:
            return self.unverified
        best = int(self.rows_C[0])
        gains = np.maximum(self.ahead_SC, 0.0).mean(axis=0).tolist()
        others = sorted(range(1, len(gains)), key=lambda index: -gains[index])
        rows = [best, *(int(self.rows_C[index]) for index in others if gains[index] > 0.25 * self.loss)]
        open_rows = [row for row in rows if self.clean[row] < MAX_CLEAN and self.counts[row] < MAX_REPEATS]
        return sorted(open_rows, key=lambda row: self.counts[row])

    def summary(self) -> str:
        """What the measurements say of the one in front, as the end of a sentence."""
        if len(self.rows_C) < 2:
            return ""
        times, lead_S = self.counts[int(self.rows_C[0])], -self.ahead_SC[:, 1]
        measured = f"measured {times} times" if times > 1 else "measured once"
        return f"; it was {measured} and leads the next one by {lead_S.mean():.1%} ± {1.96 * lead_S.std():.1%}"
