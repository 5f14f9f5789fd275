"""Real runs with a fault, or two at once: what the doctor says first, what it predicts, and what removing that gains."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations

from service.doctor.causes import findings
from service.doctor.evidence import LEAST_PCT, Finding
from service.doctor.read_run import Case
from tests.faults.hot_gpu import hot_gpu
from tests.faults.injected import FAULTS
from tests.faults.runs import Bench

BATCH, TINY = 96, 2
TIMES = 1.8
"""What a fault adds to a step, in steps."""
LEAST_STEPS, MOST_STEPS, LEAST_S = 20, 200, 2.0
"""A run is so many steps long, and between these bounds so many seconds: what a moment's disturbance brings is little of that."""
TIE_PCT = 3.0
"""Of two causes whose mending brings the same but for so many points either may come first."""
CAUSES = {
    "throttled reader": "storage-bound",
    "decoder burns CPU": "decode-bound",
    "no loader workers": "no prefetch",
    "one slow rank": "straggler",
    "slow all-reduce": "all-reduce-bound",
    "slow copy": "copy-bound",
    "slow teacher": "teacher-bound",
    "tiny batch": "launch-bound",
}
OF_RANKS = {"one slow rank", "slow all-reduce"}
REPLAYED = "hot GPU (replayed)"


@dataclass(frozen=True)
class Verdict:
    """What came of one fault, or of two."""

    faults: tuple[str, ...]
    found: tuple[Finding, ...]
    gains_pct: dict[frozenset[str], float]
    """By how much less time an image takes without each of the faults' causes, and without all of them."""

    @property
    def causes(self) -> frozenset[str]:
        return frozenset().union(*self.gains_pct)

    @property
    def first(self) -> str:
        return self.found[0].cause if self.found else "nothing"

    @property
    def predicted_pct(self) -> float:
        return self.found[0].gain_pct if self.found else 0.0

    @property
    def measured_pct(self) -> float:
        """What removing the first finding gains; 0 where that was not put there."""
        return self.gains_pct.get(frozenset(self.first.split(" and ")), 0.0)

    @property
    def named(self) -> bool:
        """Whether the first finding is what gains most alone, or both together where neither alone gains."""
        most = max(gain for causes, gain in self.gains_pct.items() if len(causes) == 1)
        if not self.found:
            return max(self.gains_pct.values()) < LEAST_PCT + TIE_PCT
        if " and " in self.first:
            return frozenset(self.first.split(" and ")) == self.causes and most < LEAST_PCT + TIE_PCT
        return self.first in self.causes and self.measured_pct >= most - TIE_PCT

    @property
    def off_points(self) -> float:
        """How far the prediction is from what was measured."""
        return abs(self.predicted_pct - self.measured_pct)


class Trials:
    """Runs with and without faults, each of which is made once."""

    def __init__(self, bench: Bench, repeats: int = 1) -> None:
        self._bench, self._repeats = bench, repeats
        self._runs: dict[tuple[int, frozenset[str], tuple[str, ...]], Case] = {}

    @cached_property
    def clean(self) -> dict[int, Case]:
        """A run without a fault, by number of workers: the one of three that other processes disturbed least."""
        return {
            workers: min((self._bench.run(workers, BATCH) for _ in range(3)), key=lambda case: case.evidence.typical.step_ms)
            for workers in (1, 2)
        }

    def run(self, workers: int, faults: frozenset[str], batch: int | None = None, sets: tuple[str, ...] = ()) -> Case:
        """A run with these faults, as many images a worker as they leave; the one of several that was disturbed least."""
        batch = batch or (TINY if "tiny batch" in faults else BATCH)
        key = workers, faults, (str(batch), *sets)
        if key not in self._runs:
            threads = ("data.loader_workers=0",) if "no loader workers" in faults else ()
            clean_s = self.clean[workers].evidence.typical.step_ms / 1e3
            put = {fault: TIMES * clean_s * (1 if fault == "slow all-reduce" else batch / BATCH) for fault in sorted(faults)}
            step_s = clean_s * batch / BATCH + sum(extra_s for fault, extra_s in put.items() if fault in FAULTS)
            steps = min(MOST_STEPS, max(LEAST_STEPS, round(LEAST_S / step_s)))
            settings = (*threads, *sets, f"train.max_steps={steps}")
            runs = [self._bench.run(workers, batch, put, settings) for _ in range(self._repeats)]
            self._runs[key] = min(runs, key=lambda case: case.evidence.typical.step_ms)
        return self._runs[key]

    def verdict(self, *faults: str) -> Verdict:
        """Of a run with these faults, and of those without one and without all of them."""
        if faults == (REPLAYED,):
            hot, cool = hot_gpu(throttled=True), hot_gpu(throttled=False)
            last_ms, cool_ms = (case.evidence.epochs[-1].step_ms for case in (hot, cool))
            return Verdict(faults, tuple(findings(hot.evidence)), {frozenset({"thermal drift"}): 100 * (1 - cool_ms / last_ms)})
        workers = 2 if OF_RANKS & set(faults) else 1
        ill = self.run(workers, frozenset(faults))
        found = tuple(findings(ill.evidence))
        gains = {}
        for mended in {frozenset({fault}) for fault in faults} | {frozenset(faults)}:
            better = self._mended(workers, frozenset(faults) - mended, mended, found)
            gain_pct = 100 * (1 - self._bench.ms_per_image(better) / self._bench.ms_per_image(ill))
            gains[frozenset(CAUSES[fault] for fault in mended)] = gain_pct
        return Verdict(faults, found, gains)

    def _mended(self, workers: int, left: frozenset[str], mended: frozenset[str], found: Sequence[Finding]) -> Case:
        """A run with the faults that are left; what the doctor proposes a value for has that."""
        batch, sets = None, tuple[str, ...]()
        if "tiny batch" in mended and (value := _proposed("data.global_batch_size", found)):
            batch = value // workers
        if "no loader workers" in mended and (value := _proposed("data.loader_workers", found)):
            sets = (f"data.loader_workers={value}",)
        return self.run(workers, left, batch, sets)

    def singles(self, faults: Sequence[str] = (*CAUSES, REPLAYED)) -> Iterator[Verdict]:
        """Each of these faults alone."""
        for fault in faults:
            yield self.verdict(fault)

    def pairs(self, faults: Sequence[str] = tuple(CAUSES)) -> Iterator[Verdict]:
        """Each two of these faults at once."""
        for two in combinations(faults, 2):
            yield self.verdict(*two)


def _proposed(option: str, found: Sequence[Finding]) -> int | None:
    """The value that the doctor names for an option."""
    values = (re.search(re.escape(option) + r"=(\d+)", finding.change) for finding in found)
    return next((int(value[1]) for value in values if value), None)


HEALTHY: dict[str, tuple[int, int, tuple[str, ...]]] = {
    "image files": (1, BATCH, ()),
    "image files, two workers": (2, BATCH, ()),
    "two loader threads": (1, BATCH, ("data.loader_workers=2",)),
    "a larger batch": (1, 2 * BATCH, ()),
    "micro-batches": (1, BATCH, ("optim.accumulate=2",)),
    "digits in memory": (
        1,
        BATCH,
        (
            "data.path=digits",
            "data.image_size=8",
            "data.augment=none",
            "student.model=resnet20",
            "teacher.weights={digits_teacher}",
        ),
    ),
    "synthetic images": (1, BATCH, ("data.path=synthetic", "data.synthetic_images=1920", "data.synthetic_classes=4")),
    "synthetic images, two workers": (
        2,
        BATCH,
        ("data.path=synthetic", "data.synthetic_images=1920", "data.synthetic_classes=4"),
    ),
    "image files in memory": (1, BATCH, ("data.cache=memory",)),
    "a wider student": (1, BATCH, ("student.model=resnet20",)),
    "images as they are": (1, BATCH, ("data.augment=none",)),
    "epochs with evaluations": (1, BATCH, ("train.max_steps=null", "optim.epochs=3")),
}
"""Real trainings of unlike kinds with nothing in them that gains 5%: workers, images of each, what else is set."""


def healthy(bench: Bench) -> Iterator[tuple[str, Case]]:
    """All of them, one after the other."""
    for name, (workers, batch, sets) in HEALTHY.items():
        yield name, bench.run(workers, batch, {}, sets)
