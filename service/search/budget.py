"""What a search may still cost, and how much a probe has to bring for its cost.

All in GPU-seconds; the unit is a lean grid, which measures every point once and briefly. A search that ends early has cost
little: what it has not spent yet is well spent on its doubts. One that has cost much already does not become dear by a probe
more. So a probe is priced by what it adds to what the search costs anyway.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from service.search.points import Array, Flags

MOST_SHARE = 0.6  # of a lean grid that is spent at most; the rest is what its estimate may be off by
REPEATS_SHARE = 0.2  # of a lean grid that is spent at most on points that were measured before
LEAST_SHARE = 0.08  # of a lean grid: a search that has cost less goes on as long as a probe may show something
DEAR_SHARE = 0.35  # of a lean grid: beyond it a probe counts as its part of what was spent
EARLY = 0.3  # price of a probe before the least share is spent


@dataclass(frozen=True)
class Budget:
    """Of a search at one time."""

    grid_gpu_s: float
    spent_gpu_s: float
    repeats_gpu_s: float  # of that, on points that were measured before

    @property
    def left_gpu_s(self) -> float:
        """For any probe."""
        return MOST_SHARE * self.grid_gpu_s - self.spent_gpu_s

    @property
    def left_repeats_gpu_s(self) -> float:
        """For one of a point that was measured before."""
        return min(self.left_gpu_s, REPEATS_SHARE * self.grid_gpu_s - self.repeats_gpu_s)

    def within(self, share: float, cost_M: Array, more_gpu_s: float = 0.0) -> Flags:
        """Which probes leave the search's cost below a share of a lean grid, and so much more."""
        return np.asarray(self.spent_gpu_s + cost_M < share * self.grid_gpu_s + more_gpu_s)

    def is_open_to_checks(self, cost_M: Array) -> Flags:
        """Whether a probe may be spent on what is expected to be worse: while the search is cheap, or where it is dear anyway."""
        spent = self.spent_gpu_s / self.grid_gpu_s
        return self.within(LEAST_SHARE, cost_M) | ((spent > DEAR_SHARE) & (cost_M < self.left_gpu_s))

    def price(self, cost: float) -> float:
        """A probe's cost in lean grids, as much as it counts."""
        share = cost / self.grid_gpu_s
        if self.within(LEAST_SHARE, np.array(cost)):
            return EARLY * share
        return share / max(self.spent_gpu_s / self.grid_gpu_s / DEAR_SHARE, 1.0)
