"""How likely a GPU's memory holds a batch: peak = base + slope · batch, from the peaks of probes and what did not fit.

Of p pipeline stages the worst one needs no more than a whole model with the same batch of a replica, p · batch. So what ran in
fewer stages runs in more, and what was out of memory in more stages is in fewer. How much less it needs depends on the cut.

Shapes: M points.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from service.config.space import PIPELINE_STAGES
from service.search.points import Array, Category, Layout

USABLE = 0.985  # of a GPU's memory: the peak at which a batch fits as often as not, for fragmentation and the driver
LINE_SD, EXTRAPOLATION_SD = 0.03, 0.04  # relative: of a peak on the line, and more for each doubling beyond what ran
LARGEST_BASE = 0.9  # of the only peak known: the base may be anything from nothing to this share of it
CREDIBLE = 0.5  # a line that gives a batch which did not fit a better chance than this is not believed
DISPUTED = 0.6  # chance of a batch that ran once and once did not
FEWER_STORED = 2.0  # times fewer activations that a stage may store beside its share of them: of some micro-batches only
OTHER_KIND = 0.2  # chance left to a batch that no kind tried so far holds


class Kind(NamedTuple):
    """Points whose peak grows along one line."""

    family: tuple[float, ...]
    """Which extra categories they have (precision, model, …), those of pipeline stages apart."""
    stages: float = 1.0


def kinds_of(layout: Layout, extras: Sequence[Category]) -> tuple[NDArray[np.int_], tuple[Kind, ...]]:
    """The kind of each point by its number, and what each kind is."""
    others = np.array([key != PIPELINE_STAGES for key, _ in extras], dtype=bool)
    each = [Kind(tuple(column), stages) for column, stages in zip(layout.member_KM[others].T, layout.stages_M, strict=True)]
    number = {kind: n for n, kind in enumerate(dict.fromkeys(each))}
    return np.array([number[kind] for kind in each]), tuple(number)


@dataclass
class MemoryModel:
    """What is known of memory, by kind.

    Weights, optimizer state and workspace do not depend on the batch, activations are linear in it. A batch up to the largest
    that ran fits, whatever the line says. With one peak the line is unknown but bounded: the base is not negative, so that the
    peak grows at most in proportion to the batch.
    """

    kinds: Sequence[Kind] = ()  # by number; those beyond have no relatives
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
            relatives = {other: more for other, more in self._relatives(kind) if other in known}
            chance = (
                self._chances(kind, batches) if kind in known else self._guess(relatives or dict.fromkeys(known, 1.0), batches)
            )
            for other, more in relatives.items():
                if more > 1:
                    ran = self.largest.get(other, 0.0) / more
                    chance[(batches <= ran) & (batches < self.refused.get(kind, np.inf))] = 1.0
                else:
                    refused = self.refused.get(other, np.inf) / more
                    chance[(batches >= refused) & (batches > self.largest.get(kind, 0.0))] = 0.0
            chance_M[of_kind_M] = chance
        return chance_M

    def _guess(self, others: Mapping[int, float], batch_M: Array) -> Array:
        """Of a kind that was not tried, from others: each with how many times as many stages share the layers here.

        For an image a worker needs as much as there, or so many times less: both are taken for equally likely.
        """
        guesses = [
            self._chances(other, size_M)
            for other, more in others.items()
            for size_M in ((batch_M,) if more == 1 else (batch_M, batch_M / more))
        ]
        return np.asarray(np.maximum(np.mean(guesses, axis=0), OTHER_KIND))

    def _relatives(self, kind: int) -> Iterator[tuple[int, float]]:
        """Kinds that differ from this one in their pipeline stages alone, and how many times as many stages this one has."""
        if kind < len(self.kinds):
            family, own_stages = self.kinds[kind]
            for other, (its_family, stages) in enumerate(self.kinds):
                if other != kind and its_family == family:
                    yield other, own_stages / stages

    def _chances(self, kind: int, batch_M: Array) -> Array:
        """Of a kind that was tried."""
        ran, refused = self.largest.get(kind, 0.0), self.refused.get(kind, np.inf)
        chance_M = self._by_line(kind, batch_M)
        if refused < np.inf:
            fits = float(self._by_line(kind, np.array([refused]))[0])
            has_line = len(self.peaks.get(kind, {})) > 1 or (kind in self.peaks and bool(self._relatives_with_lines(kind)))
            if has_line and fits < CREDIBLE:
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
            if slopes := [self._slopes(other, more, batch, peak) for other, more in self._relatives_with_lines(kind)]:
                return np.asarray(
                    np.mean([_by_slopes(least, most, limit - peak, batch_M - batch) for least, most in slopes], axis=0)
                )
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

    def _relatives_with_lines(self, kind: int) -> list[tuple[int, float]]:
        return [(other, more) for other, more in self._relatives(kind) if len(self.peaks.get(other, {})) > 1]

    def _slopes(self, other: int, more: float, batch: float, peak: float) -> tuple[float, float]:
        """The least and the most that a further image takes in `more` times as many stages as `other` has, whose line is known.

        A stage stores the activations of all micro-batches, as a whole model does, or of a few. Of the one `peak` known what is
        left for images is bounded too: a stage of fewer has no fewer parameters, and at most so many times more.
        """
        slope, base = self._line(self.peaks[other])
        least, most = (slope / more / FEWER_STORED, slope) if more > 1 else (slope, slope / more * FEWER_STORED)
        smallest_base, largest_base = sorted((max(base, 0.0), max(base, 0.0) / more))
        fewest, largest = (peak * (1 - LINE_SD) - largest_base) / batch, (peak * (1 + LINE_SD) - smallest_base) / batch
        agree = fewest < most and least < largest
        return (max(least, fewest), min(most, largest)) if agree else (least, most)

    @staticmethod
    def _line(peaks: dict[float, float]) -> tuple[float, float]:
        """Slope and base through two or more peaks."""
        slope, base = np.polyfit(list(peaks), list(peaks.values()), 1)
        return max(float(slope), 0.0), float(base)


def _by_slopes(least: float, most: float, left_mib: float, further_M: Array) -> Array:
    """The chance that so many further images fit into what is left, every slope in between being equally likely."""
    allowed_M = left_mib / np.maximum(further_M, 1e-9)
    return np.asarray(np.clip((allowed_M - least) / max(most - least, 1e-9), 0.0, 1.0))
