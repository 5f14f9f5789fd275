"""How likely a GPU's memory holds a batch: peak = base + slope · batch, from the peaks of probes and what did not fit.

Shapes: M points.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from service.search.points import Array, Layout

USABLE = 0.985  # of a GPU's memory: the peak at which a batch fits as often as not, for fragmentation and the driver
LINE_SD, EXTRAPOLATION_SD = 0.03, 0.04  # relative: of a peak on the line, and more for each doubling beyond what ran
LARGEST_BASE = 0.9  # of the only peak known: the base may be anything from nothing to this share of it
CREDIBLE = 0.5  # a line that gives a batch which did not fit a better chance than this is not believed
DISPUTED = 0.6  # chance of a batch that ran once and once did not
OTHER_KIND = 0.2  # chance left to a batch that no kind tried so far holds


def kinds_of(layout: Layout) -> NDArray[np.int_]:
    """A number for each point: those of one kind have the same extra categories (precision, model, pipeline stages, …).

    Their peak grows along one line.
    """
    each = [tuple(column) for column in layout.member_KM.T]
    number = {kind: n for n, kind in enumerate(dict.fromkeys(each))}
    return np.array([number[kind] for kind in each])


@dataclass
class MemoryModel:
    """What is known of memory, by kind.

    Weights, optimizer state and workspace do not depend on the batch, activations are linear in it. A batch up to the largest
    that ran fits, whatever the line says. With one peak the line is unknown but bounded: the base is not negative, so that the
    peak grows at most in proportion to the batch.
    """

    peaks: dict[int, dict[float, float]] = field(default_factory=dict)  # kind → batch → peak MiB
    largest: dict[int, float] = field(default_factory=dict)  # kind → largest batch that ran
    refused: dict[int, float] = field(default_factory=dict)  # kind → smallest batch that ran out of memory
    capacity_mib: float = np.inf

    def add(self, kind: int, batch: float, peak_mib: float | None, capacity_mib: float | None, oom: bool) -> None:
        """Take up a probe at `batch` images a GPU."""
        if capacity_mib is not None:
            self.capacity_mib = min(self.capacity_mib, capacity_mib)
        if oom:
            self.refused[kind] = min(batch, self.refused.get(kind, np.inf))
            return
        self.largest[kind] = max(batch, self.largest.get(kind, 0.0))
        if peak_mib is not None:
            peaks = self.peaks.setdefault(kind, {})
            peaks[batch] = max(peak_mib, peaks.get(batch, 0.0))

    def is_line_unknown(self) -> bool:
        """Whether a probe of another batch would tell how the peak grows, and none has so far."""
        return bool(self.peaks) and all(len(peaks) < 2 for peaks in self.peaks.values())

    def chances(self, kind_M: NDArray[np.int_], batch_M: Array) -> Array:
        """The probability that each batch fits."""
        chance_M = np.ones(len(batch_M))
        known = sorted({*self.largest, *self.refused})
        for kind in np.unique(kind_M).tolist() if known else ():
            of_kind_M = kind_M == kind
            batches = batch_M[of_kind_M]
            if kind in known:
                chance_M[of_kind_M] = self._chances(kind, batches)
            else:
                guess = np.mean([self._chances(other, batches) for other in known], axis=0)
                chance_M[of_kind_M] = np.maximum(guess, OTHER_KIND)
        return chance_M

    def _chances(self, kind: int, batch_M: Array) -> Array:
        """Of a kind that was tried."""
        ran, refused = self.largest.get(kind, 0.0), self.refused.get(kind, np.inf)
        chance_M = self._by_line(kind, batch_M)
        if refused < np.inf:
            fits = float(self._by_line(kind, np.array([refused]))[0])
            if len(self.peaks.get(kind, {})) > 1 and fits < CREDIBLE:
                chance_M = np.maximum(chance_M - fits, 0.0) / (1 - fits)  # by the line, given that the refused one does not fit
            else:
                chance_M = np.minimum(chance_M, 1 - (batch_M / refused) ** 2)
        chance_M[batch_M <= ran] = 1.0
        chance_M[batch_M >= refused] = 0.0
        chance_M[(refused <= batch_M) & (batch_M <= ran)] = DISPUTED
        return chance_M

    def _by_line(self, kind: int, batch_M: Array) -> Array:
        peaks, limit = self.peaks.get(kind, {}), USABLE * self.capacity_mib
        if not peaks or limit == np.inf:
            return np.ones_like(batch_M)
        if len(peaks) == 1:
            batch, peak = next(iter(peaks.items()))
            return self._by_one_peak(batch, peak, batch_M)
        slope, base = self._line(peaks)
        beyond_M = np.maximum(np.log2(batch_M / max(peaks)), 0.0)
        sd_M = LINE_SD + EXTRAPOLATION_SD * beyond_M
        return np.asarray(ndtr(np.log(limit / np.maximum(base + slope * batch_M, 1.0)) / sd_M))

    def _by_one_peak(self, batch: float, peak: float, batch_M: Array) -> Array:
        """The base is equally likely to be any share of the peak up to `LARGEST_BASE`.

        Weights and optimizer state hardly change with the kind: half of the smallest base known is taken for granted.
        """
        bases = [self._line(other)[1] for other in self.peaks.values() if len(other) > 1]
        least = min(max(0.5 * min(bases, default=0.0) / peak, 0.0), 0.8 * LARGEST_BASE)
        more_M = np.maximum(batch_M / batch - 1, 1e-9)
        needed_M = 1 - (USABLE * self.capacity_mib / peak - 1) / more_M  # share of the peak that the base must be for it to fit
        return np.asarray(np.clip((LARGEST_BASE - needed_M) / (LARGEST_BASE - least), 0.0, 1.0))

    @staticmethod
    def _line(peaks: dict[float, float]) -> tuple[float, float]:
        """Slope and base through two or more peaks."""
        slope, base = np.polyfit(list(peaks), list(peaks.values()), 1)
        return max(float(slope), 0.0), float(base)
