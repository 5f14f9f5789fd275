"""Time each phase of a step with marks that cost a microsecond each and never stop the GPU.

On a GPU, marks are CUDA events in the step's stream, read once the GPU has passed them. `data` is then the time for which the
stream waited for the loader: 0 if a batch was ready, however long the Python thread waited. `h2d` is the wait for the copy that
follows, and `augment` is augmentation and normalization on the device.

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
"""Quantiles are over this many latest steps; means, minima and maxima are exact over all steps."""
_MAX_PENDING = 256
_COLUMN = {phase: column for column, phase in enumerate(ALL_PHASES)}
_STEP = len(ALL_PHASES)

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Statistics:
    """Statistics of step times, in ms."""

    mean: float
    min: float
    max: float
    p50: float
    p95: float

    @classmethod
    def merge(cls, ranks: Sequence["Statistics"]) -> "Statistics":
        """Merge ranks: the minimum and maximum over all of them; the other numbers are means over ranks."""
        return cls(
            mean=fmean(rank.mean for rank in ranks),
            min=min(rank.min for rank in ranks),
            max=max(rank.max for rank in ranks),
            p50=fmean(rank.p50 for rank in ranks),
            p95=fmean(rank.p95 for rank in ranks),
        )


StepStatistics = dict[str, Statistics]
"""Statistics by phase and for `step`; see `StepTimes.statistics`."""


def named(statistics: StepStatistics) -> dict[str, float]:
    """Name the numbers: `phase/data_ms` (mean), `phase/data_min_ms`, `…_max_ms`, `…_p50_ms`, `…_p95_ms`, `phase/step_ms` …"""
    return {
        f"phase/{name}{'' if statistic == 'mean' else f'_{statistic}'}_ms": value
        for name, each in statistics.items()
        for statistic, value in asdict(each).items()
    }


def data_pct(statistics: StepStatistics) -> dict[str, float]:
    """Return `data_pct`, the percentage of `data` in a step; {} without steps, or if this stage has no loader."""
    if not statistics or RECEIVE in statistics:
        return {}
    step_ms = statistics["step"].mean
    return {"data_pct": 100 * statistics["data"].mean / step_ms if step_ms > 0 else 0.0}


class StepTimes:
    """Times of steps: exact sums, minima and maxima, and the latest `MAX_STEPS` rows (T,) for quantiles."""

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
        """Return the seconds of each of the latest `MAX_STEPS` steps."""
        return [float(row_T[_STEP]) / 1e3 for row_T in self._latest]

    def statistics(self) -> StepStatistics:
        """Return statistics of each phase and of the step; {} without steps. Optional phases that took 0 are left out."""
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

    Call `start()`, then `mark(phase)` as each phase ends, then `stop()`. A phase runs from the previous mark, so the phases and
    the time after the last mark add up to the step. Marking a phase again (accumulated micro-batches) adds to its time; an
    unmarked phase takes 0. A second `start()` drops an unfinished step, as at an epoch's end.

    Args:
        device: the device whose time is measured.
        warmup_steps: number of first steps that `past_warmup` leaves out.
        clock: a time source other than the device's.
        heartbeat: is notified as each phase ends on the host.
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
        """Begin a step with its `data` phase."""
        if self._timestamps:
            self._clock.reuse(self._timestamps)
        self._timestamps, self._columns = [self._now()], []

    def mark(self, phase: str) -> None:
        """End `phase`, which began at the last mark. Raises KeyError: there is no such phase."""
        self._columns.append(_COLUMN[phase])
        self._timestamps.append(self._now())
        self._heartbeat.end_phase(phase)

    def begin_micro_batch(self) -> None:
        """Note that the phases of another micro-batch follow. This costs no mark."""
        self._heartbeat.begin_micro_batch()

    def stop(self) -> None:
        self._timestamps.append(self._now())
        self._pending.append((self._timestamps, self._columns, self._window))
        self._timestamps, self._columns = [], []
        if len(self._pending) >= _MAX_PENDING:
            self.collect()

    @property
    def past_warmup(self) -> StepTimes:
        """Times of all finished steps past the warm-up."""
        self.collect()
        return self._past_warmup

    def end_window(self) -> StepTimes:
        """Return the times of the steps since the last call, which `collect` fills in as the device finishes them."""
        window, self._window = self._window, StepTimes()
        return window

    def collect(self) -> None:
        """Read the steps that the device has finished, and leave the others for the next call. Never waits for the device."""
        while self._pending:
            timestamps, columns, window = self._pending[0]
            # A stream runs in order, so if the last event is done, all are.
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
    """Return one step's times in ms (T,)."""
    row = [0.0] * len(COLUMNS)
    for column, earlier, later in zip(columns, timestamps, timestamps[1:], strict=False):
        row[column] += clock.ms_between(earlier, later)
    row[_STEP] = clock.ms_between(timestamps[0], timestamps[-1])
    return np.array(row)
