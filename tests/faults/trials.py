"""Each fault once: what the doctor says first, what it predicts, and what removing the fault gains."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from service.doctor.records import Case
from service.doctor.rules import findings
from tests.faults.hot_gpu import hot_gpu
from tests.faults.runs import Bench

BATCH = 96
TIMES = 1.8
"""What a fault adds to a step, in steps."""
CAUSES = {
    "throttled reader": "storage-bound",
    "decoder burns CPU": "decode-bound",
    "one slow rank": "straggler",
    "slow all-reduce": "all-reduce-bound",
    "slow copy": "copy-bound",
    "slow teacher": "teacher-bound",
    "tiny batch": "launch-bound",
    "hot GPU (replayed)": "thermal drift",
}


@dataclass(frozen=True)
class Verdict:
    """What came of one fault."""

    fault: str
    expected: str
    first: str
    predicted_pct: float
    measured_pct: float

    @property
    def named(self) -> bool:
        return self.first == self.expected

    @property
    def off_pct(self) -> float:
        """How far the prediction is from what was measured, as a part of that."""
        return 100 * abs(self.predicted_pct / self.measured_pct - 1)


def verdict(fault: str, case: Case, measured_pct: float) -> Verdict:
    found = findings(case.evidence)
    first = found[0] if found else None
    return Verdict(fault, CAUSES[fault], first.cause if first else "nothing", first.gain_pct if first else 0.0, measured_pct)


def gained_pct(bench: Bench, slow: Case, mended: Case) -> float:
    """By how much less time an image takes."""
    return 100 * (1 - bench.ms_per_image(mended) / bench.ms_per_image(slow))


def healthy(bench: Bench) -> dict[int, Case]:
    """A run without a fault, by number of workers: the one of three that other processes disturbed least."""
    return {
        num_workers: min((bench.run(num_workers, BATCH) for _ in range(3)), key=lambda case: case.evidence.typical.step_ms)
        for num_workers in (1, 2)
    }


def carry_out(bench: Bench, clean: dict[int, Case], faults: Sequence[str] = tuple(CAUSES)) -> Iterator[Verdict]:
    """These faults, one after the other, beside `healthy` runs."""
    for fault in faults:
        if fault == "tiny batch":
            slow = bench.run(1, 2)
            change = next((finding.change for finding in findings(slow.evidence)), "")
            larger = re.search(r"data\.global_batch_size=(\d+)", change)
            mended = bench.run(1, int(larger[1]) if larger else BATCH)
            yield verdict(fault, slow, gained_pct(bench, slow, mended))
        elif fault == "hot GPU (replayed)":
            hot, cool = hot_gpu(throttled=True), hot_gpu(throttled=False)
            last_ms, cool_ms = (case.evidence.epochs[-1].step_ms for case in (hot, cool))
            yield verdict(fault, hot, 100 * (1 - cool_ms / last_ms))
        else:
            workers = 2 if fault in ("one slow rank", "slow all-reduce") else 1
            extra_s = TIMES * clean[workers].evidence.typical.step_ms / 1e3
            slow = bench.run(workers, BATCH, fault, extra_s)
            yield verdict(fault, slow, gained_pct(bench, slow, bench.run(workers, BATCH)))
