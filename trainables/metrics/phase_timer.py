"""The time of each phase of a step, from marks that cost a microsecond each and never stop the GPU.

On a GPU the marks are CUDA events in the stream of the step, read after the GPU has passed them. `data` is then the time
for which the stream waited for the loader: 0 where a batch was ready, however long the Python thread waited. `h2d` is the
wait for the copy that follows, and `augment` is augmentation and normalization on the device.

Shapes: S steps, T timed columns (the phases, then the whole step).
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trainables.metrics.clock import Clock, clock_of
from trainables.metrics.heartbeat import Heartbeat
from trainables.metrics.phases import ALL_PHASES, PHASES, RECEIVE

COLUMNS = (*ALL_PHASES, "step")
MAX_STEPS = 10_000
"""The latest steps, of which quantiles are; means, minima and maxima are exact over all steps."""
_MAX_PENDING = 256
_COLUMN = {phase: column for column, phase in enumerate(ALL_PHASES)}
_STEP = len(ALL_PHASES)

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Statistics:
    """What the times of steps come to, in ms."""

    mean: float
    min: float
    max: float
    p50: float
    p95: float

    @classmethod
    def of_ranks(cls, ranks: Sequence["Statistics"]) -> "Statistics":
        """The numbers of all ranks' steps: the least and the most of any; the other numbers are means over ranks."""
        return cls(
            mean=fmean(rank.mean for rank in ranks),
            min=min(rank.min for rank in ranks),
            max=max(rank.max for rank in ranks),
            p50=fmean(rank.p50 for rank in ranks),
            p95=fmean(rank.p95 for rank in ranks),
        )


StepStatistics = dict[str, Statistics]
"""By phase, and of `step`; see `StepTimes.statistics`."""


def named(statistics: StepStatistics) -> dict[str, float]:
    """As a record has them: `phase/data_ms` (mean), `phase/data_min_ms`, `…_max_ms`, `…_p50_ms`, `…_p95_ms`, `phase/step_ms` …"""
    return {
        f"phase/{name}{'' if statistic == 'mean' else f'_{statistic}'}_ms": value
        for name, each in statistics.items()
        for statistic, value in asdict(each).items()
    }


def data_pct(statistics: StepStatistics) -> dict[str, float]:
    """The share of `data` in a step, in percent, as `data_pct`; {} without steps, and where there is no loader to wait for."""
    if not statistics or RECEIVE in statistics:
        return {}
    step_ms = statistics["step"].mean
    return {"data_pct": 100 * statistics["data"].mean / step_ms if step_ms > 0 else 0.0}


class StepTimes:
    """The times of some steps: exact sums, minima and maxima, and the latest `MAX_STEPS` rows (T,) for quantiles."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._sum_T = np.zeros(len(COLUMNS))
        self._min_T = np.full(len(COLUMNS), np.inf)
        self._max_T = np.full(len(COLUMNS), -np.inf)
        self._latest: deque[Floats] = deque(maxlen=MAX_STEPS)

    def add(self, row_T: Floats) -> None:
        self._num_steps += 1
        self._sum_T += row_T
        np.minimum(self._min_T, row_T, out=self._min_T)
        np.maximum(self._max_T, row_T, out=self._max_T)
        self._latest.append(row_T)

    def steps_s(self) -> list[float]:
        """Seconds of each step, the latest `MAX_STEPS` of them."""
        return [float(row_T[_STEP]) / 1e3 for row_T in self._latest]

    def statistics(self) -> StepStatistics:
        """Each phase and the whole step; {} without steps. A phase that not every job has is left out where it took 0."""
        if not self._num_steps:
            return {}
        p50_T, p95_T = np.quantile(np.stack(self._latest), (0.5, 0.95), axis=0)
        columns = np.stack((self._sum_T / self._num_steps, self._min_T, self._max_T, p50_T, p95_T), axis=1).tolist()
        return {
            name: Statistics(*columns[column])
            for column, name in enumerate(COLUMNS)
            if name in PHASES or name == "step" or self._sum_T[column]
        }


class PhaseTimer:
    """Times the phases of each step of one training thread.

    A step is `start()`, then `mark(phase)` as each phase ends, then `stop()`. A phase runs from the mark before it, so the
    phases and the rest after the last mark add up to the step. A phase marked again (accumulated micro-batches) adds to
    itself; one that is not marked took 0. A second `start()` drops an unfinished step, as at an epoch's end.

    Args:
        device: the device whose time counts.
        warmup_steps: first steps that `past_warmup` leaves out.
        clock: a source of time other than the device's.
        heartbeat: learns of each phase as it ends on the host.
    """

    def __init__(
        self, device: torch.device, warmup_steps: int = 0, clock: Clock | None = None, heartbeat: Heartbeat | None = None
    ):
        self._heartbeat = heartbeat or Heartbeat()
        self._clock = clock or clock_of(device)
        self._now = self._clock.now
        self._warmup_left = warmup_steps
        self._timestamps: list[Any] = []
        self._columns: list[int] = []
        self._pending: deque[tuple[list[Any], list[int], StepTimes]] = deque()
        self._past_warmup, self._window = StepTimes(), StepTimes()

    def start(self) -> None:
        """Open a step; `data` runs from here."""
        if self._timestamps:
            self._clock.reuse(self._timestamps)
        self._timestamps, self._columns = [self._now()], []

    def mark(self, phase: str) -> None:
        """Close `phase`, which ran since the last mark. Raises KeyError: no such phase."""
        self._columns.append(_COLUMN[phase])
        self._timestamps.append(self._now())
        self._heartbeat.end_phase(phase)

    def begin_micro_batch(self) -> None:
        """The phases of a further micro-batch follow; costs no mark."""
        self._heartbeat.begin_micro_batch()

    def stop(self) -> None:
        self._timestamps.append(self._now())
        self._pending.append((self._timestamps, self._columns, self._window))
        self._timestamps, self._columns = [], []
        if len(self._pending) >= _MAX_PENDING:
            self.collect()

    @property
    def past_warmup(self) -> StepTimes:
        """All steps past the warm-up that the device has finished."""
        self.collect()
        return self._past_warmup

    def end_window(self) -> StepTimes:
        """The steps since the last call, whose times are in it once `collect` has read them."""
        window, self._window = self._window, StepTimes()
        return window

    def collect(self) -> None:
        """Read the steps that the device has finished; the others stay for the next call. Never waits for the device."""
        while self._pending:
            timestamps, columns, window = self._pending[0]
            # One stream runs in order: where the last event is past, all are.
            if not self._clock.ready(timestamps[-1]):
                return
            self._pending.popleft()
            row_T = _row(self._clock, timestamps, columns)
            window.add(row_T)
            if self._warmup_left > 0:
                self._warmup_left -= 1
            else:
                self._past_warmup.add(row_T)
            self._clock.reuse(timestamps)


def _row(clock: Clock, timestamps: Sequence[Any], columns: Sequence[int]) -> Floats:
    """One step's times in ms (T,)."""
    row = [0.0] * len(COLUMNS)
    for column, earlier, later in zip(columns, timestamps, timestamps[1:], strict=False):
        row[column] += clock.ms_between(earlier, later)
    row[_STEP] = clock.ms_between(timestamps[0], timestamps[-1])
    return np.array(row)
