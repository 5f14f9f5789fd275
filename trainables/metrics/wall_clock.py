"""The wall time of a job by part. Every second counts for exactly one part, so that the parts add up to the whole."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping

from trainables.metrics.heartbeat import Heartbeat

PARTS = ("train", "eval", "checkpoint", "timing", "other")
"""Steps including waits for data, evaluation, writing checkpoints, timing passes after training, and everything else."""


class WallClock:
    """Adds up seconds by part; time outside of `part` counts as `other`.

    Args:
        saved: the `state` of an earlier process of the job, to continue from.
        clock: a time source.
        heartbeat: is notified as each part begins.
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
        """Begin the job. Time before this is not counted."""
        self._part, self._part_start_s = "other", self._clock()
        self._heartbeat.enter("other")

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """A context whose time counts for the part `name`, and not for an enclosing part."""
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
        """Return the job's `train_s`, `eval_s`, `checkpoint_s`, `timing_s`, `other_s` so far, and their sum `wall_s`."""
        self._enter(self._part)
        return in_seconds(self._job)

    def state(self) -> dict[str, dict[str, float]]:
        """Return plain data from which a later process of the job continues: seconds of the job and of the epoch."""
        self._enter(self._part)
        return {"job": dict(self._job), "epoch": dict(self._epoch)}

    def end_epoch(self) -> dict[str, float]:
        """Return the same for the epoch, without `timing_s`, and begin the next epoch."""
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
    """Name the seconds of each part, and add their sum."""
    return {f"{part}_s": sums[part] for part in PARTS} | {"wall_s": sum(sums[part] for part in PARTS)}
