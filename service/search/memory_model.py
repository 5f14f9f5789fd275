"""Which batches a GPU's memory holds: peak = base + slope · batch, from the peaks of probes, and never again after an OOM."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from service.search.points import Array, Flags

HEADROOM = 0.97  # of a GPU's memory: what fragmentation and the driver may take is not for use


@dataclass
class MemoryModel:
    """What is known of memory, by kind: a kind is one combination of extra categories (precision, model, …).

    Weights, optimizer state and workspace do not depend on the batch, activations are linear in it. With one probe the line is
    unknown but bounded: the base is not negative, so the peak grows at most in proportion to the batch.
    """

    seen: dict[int, dict[float, float]] = field(default_factory=dict)  # kind → batch → peak MiB
    refused: dict[int, float] = field(default_factory=dict)  # kind → smallest batch that ran out of memory
    capacity_mib: float = np.inf

    def tell(self, kind: int, batch: float, peak_mib: float | None, capacity_mib: float | None, oom: bool) -> None:
        """Take up a probe at `batch` images a GPU."""
        if capacity_mib is not None:
            self.capacity_mib = min(self.capacity_mib, capacity_mib)
        if oom:
            self.refused[kind] = min(batch, self.refused.get(kind, np.inf))
        elif peak_mib is not None:
            peaks = self.seen.setdefault(kind, {})
            peaks[batch] = max(peak_mib, peaks.get(batch, 0.0))

    def peak_mib(self, kind: int, batch_M: Array) -> Array:
        """Expected peak; an upper bound where one probe is all there is; zero where there is none."""
        peaks = self.seen.get(kind) or {}
        if not peaks:
            return np.zeros_like(batch_M)
        if len(peaks) > 1:
            slope, base = self._line(peaks)
            return np.maximum(base + slope * batch_M, 0.0)
        # Weights and optimizer state hardly change with the kind: half of the smallest base known is taken for granted.
        ((batch, peak),) = peaks.items()
        base = 0.5 * min((self._line(other)[1] for other in self.seen.values() if len(other) > 1), default=0.0)
        base = min(max(base, 0.0), peak)
        return base + (peak - base) * np.maximum(batch_M / batch, 1.0)

    @staticmethod
    def _line(peaks: dict[float, float]) -> tuple[float, float]:
        """Slope and base through two or more probes."""
        slope, base = np.polyfit(list(peaks), list(peaks.values()), 1)
        return max(float(slope), 0.0), float(base)

    def is_line_unknown(self) -> bool:
        """Whether a probe of another batch would tell how the peak grows, and none has so far."""
        return bool(self.seen) and all(len(peaks) < 2 for peaks in self.seen.values())

    def fits(self, kind_M: NDArray[np.int_], batch_M: Array) -> Flags:
        """Whether each batch is believed to fit. A kind that nobody tried borrows the line of the hungriest."""
        limit = HEADROOM * self.capacity_mib
        fits_M = np.ones(len(batch_M), dtype=bool)
        for kind in np.unique(kind_M):
            mine = kind_M == kind
            models = [int(kind)] if int(kind) in self.seen or int(kind) in self.refused else list(self.seen)
            for model in models:
                fits_M[mine] &= self.peak_mib(model, batch_M[mine]) <= limit
            fits_M[mine] &= batch_M[mine] < self.refused.get(int(kind), np.inf)
        return fits_M
