"""Where the wall time of a job goes: every second lies in exactly one part, so that the parts add up to what the clock says."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping

PARTS = ("train", "eval", "checkpoint", "other")
"""Steps with their waits for data, evaluations, writing checkpoints, and whatever lies between: checks, reports, summaries."""


class WallClock:
    """Adds up seconds by part; what is in no `part` is `other`.

    Args:
        total: seconds by part of the whole job, changed in place, so that a checkpoint carries them to the next process.
        epoch: the same of the epoch under way.
        clock: another source of time.
    """

    def __init__(self, total: dict[str, float], epoch: dict[str, float], clock: Callable[[], float] = time.perf_counter):
        self._total, self._epoch, self._clock = total, epoch, clock
        for sums in (total, epoch):
            for part in PARTS:
                sums.setdefault(part, 0.0)
        self._part, self._since = "other", clock()

    def begin(self) -> None:
        """The job begins: what passed until now was its start, which is not counted here."""
        self._part, self._since = "other", self._clock()

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count what passes inside to the part `name`; one part may lie inside another, and takes its time from it."""
        before = self._part
        self._enter(name)
        try:
            yield
        finally:
            self._enter(before)

    @property
    def train_s(self) -> float:
        """Seconds of training so far."""
        self._enter(self._part)
        return self._total["train"]

    def total(self) -> dict[str, float]:
        """The whole job so far: `train_s`, `eval_s`, `checkpoint_s`, `other_s` and their sum `wall_s`."""
        self._enter(self._part)
        return in_seconds(self._total)

    def end_epoch(self) -> dict[str, float]:
        """The same of the epoch so far; the next one begins."""
        self._enter(self._part)
        passed = in_seconds(self._epoch)
        self._epoch.update(dict.fromkeys(PARTS, 0.0))
        return passed

    def _enter(self, part: str) -> None:
        now = self._clock()
        for sums in (self._total, self._epoch):
            sums[self._part] += now - self._since
        self._part, self._since = part, now


def in_seconds(sums: Mapping[str, float]) -> dict[str, float]:
    """Seconds by part, as named numbers with their sum."""
    return {f"{part}_s": sums[part] for part in PARTS} | {"wall_s": sum(sums[part] for part in PARTS)}
