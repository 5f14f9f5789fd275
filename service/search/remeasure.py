"""Which of the leading points to measure again before one of them is called the best.

One probe may have been lucky, or older than a change of the cluster. The leaders are measured in turn, and so under about the
same conditions, until what is lost by taking the one in front is immaterial, or not worth another probe.

Shapes: C leading points, S draws.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from service.search.pareto_front import Rows
from service.search.posterior import Posterior

LEADERS = 4  # that are compared; the fourth hardly ever wins
IMMATERIAL = 0.005  # expected loss at which it does not matter which one is taken
LEAST_VISITS, MOST_VISITS = 2, 5  # undisturbed ones of the one in front; of any
MOST_LOOKS = 12  # at one point, while somebody else stays on the cluster
UNLIKELY = 0.02  # chance of being the best below which a leader is not measured again


@dataclass(frozen=True)
class Contest:
    """How the leaders stand."""

    rows_C: Rows  # the one in front first
    loss: float  # expected, of taking the one in front; relative
    lead: float  # on the next one, relative, and its standard deviation
    lead_sd: float
    gains_C: tuple[float, ...]  # what each of the others is expected to be better by
    visits: Counter[int]
    clean: Counter[int]  # of those, the ones that nobody disturbed

    @classmethod
    def of(cls, posterior: Posterior, rows: Sequence[int], clean: Sequence[int], seed: Sequence[int]) -> Contest:
        """`rows` of the measurements so far, `clean` are those that were not disturbed."""
        rows_C = posterior.leaders(LEADERS)
        rows_C = rows_C[np.isfinite(posterior.cost_U[np.argsort(posterior.cost_U, kind="stable")[:LEADERS]])]
        cost_SC = posterior.among(rows_C, np.random.default_rng(seed))
        ahead_SC = cost_SC[:, :1] - cost_SC
        loss = float(ahead_SC.max(axis=1).mean())
        gains_C = tuple(np.maximum(ahead_SC, 0.0).mean(axis=0).tolist())
        next_S = -ahead_SC[:, 1] if len(rows_C) > 1 else np.array([math.inf])
        return cls(
            rows_C,
            loss,
            float(next_S.mean()),
            float(next_S.std()) if len(rows_C) > 1 else 0.0,
            gains_C,
            Counter(rows),
            Counter(clean),
        )

    @property
    def is_settled(self) -> bool:
        """Whether the one in front was confirmed, and what may be lost by taking it is immaterial."""
        return self.loss <= IMMATERIAL and self.clean[int(self.rows_C[0])] >= LEAST_VISITS

    def candidates(self) -> list[int]:
        """Those that another measurement may say something about, the most useful first."""
        best = int(self.rows_C[0])
        if self.clean[best] < LEAST_VISITS:
            return [best] if self.visits[best] < MOST_LOOKS else []
        incumbents = [index for index in range(1, len(self.rows_C)) if self.gains_C[index] > 0.25 * self.loss]
        rows = [best, *(int(self.rows_C[index]) for index in sorted(incumbents, key=lambda index: -self.gains_C[index]))]
        open_rows = [row for row in rows if self.clean[row] < MOST_VISITS and self.visits[row] < MOST_LOOKS]
        return sorted(open_rows, key=lambda row: self.visits[row])

    def summary(self) -> str:
        """What the contest says of the one in front, as the end of a sentence."""
        if len(self.rows_C) < 2:
            return ""
        times = self.visits[int(self.rows_C[0])]
        measured = f"measured {times} times" if times > 1 else "measured once"
        return f"; it was {measured} and leads the next one by {self.lead:.1%} ± {1.96 * self.lead_sd:.1%}"
