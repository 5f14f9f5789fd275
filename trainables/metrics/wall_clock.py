"""The wall time of a job by part: every second counts to exactly one part, so that the parts add up to the whole."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping

from trainables.metrics.heartbeat import Heartbeat

PARTS = ("train", "eval", "checkpoint", "timing", "other")
"""Steps with their waits for data, evaluations, writing checkpoints, timing passes after the training, whatever lies between."""


class WallClock:
    """Adds up seconds by part; time outside of `part` counts as `other`.

    Args:
        saved: the `state` of an earlier process of the job, which is continued.
        clock: a source of time.
        heartbeat: learns of each part as it begins.
    """

    def __init__(
        self,
        saved: Mapping[str, Mapping[str, float]] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        heartbeat: Heartbeat | None = None,
    ):
        saved = saved or {"job": {}, "epoch": {}}
        self._job, self._epoch = ({part: saved[span].get(part, 0.0) for part in PARTS} for span in ("job", "epoch"))
        self._clock = clock
        self._heartbeat = heartbeat or Heartbeat()
        self._part, self._part_start_s = "other", clock()

    def begin(self) -> None:
        """The job begins: the time until now is not counted."""
        self._part, self._part_start_s = "other", self._clock()
        self._heartbeat.enter("other")

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Count the time inside to the part `name`; inside another part it takes its time from that."""
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
        return self._job["train"]

    def total(self) -> dict[str, float]:
        """The whole job so far: `train_s`, `eval_s`, `checkpoint_s`, `timing_s`, `other_s` and their sum `wall_s`."""
        self._enter(self._part)
        return in_seconds(self._job)

    def state(self) -> dict[str, dict[str, float]]:
        """What a later process of the job continues from, as plain data: the seconds so far of the job and of the epoch."""
        self._enter(self._part)
        return {"job": dict(self._job), "epoch": dict(self._epoch)}

    def end_epoch(self) -> dict[str, float]:
        """The same of the epoch so far, in which no passes are timed; the next one begins."""
        self._enter(self._part)
        passed = in_seconds(self._epoch)
        del passed["timing_s"]
        self._epoch = dict.fromkeys(PARTS, 0.0)
        return passed

    def _enter(self, part: str) -> None:
        now = self._clock()
        for sums in (self._job, self._epoch):
            sums[self._part] += now - self._part_start_s
        if part != self._part:
            self._heartbeat.enter(part)
        self._part, self._part_start_s = part, now


def in_seconds(sums: Mapping[str, float]) -> dict[str, float]:
    """Seconds by part, as named numbers with their sum."""
    return {f"{part}_s": sums[part] for part in PARTS} | {"wall_s": sum(sums[part] for part in PARTS)}
