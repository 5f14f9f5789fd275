"""The time of each phase of a step, from marks that cost a microsecond each and never stop the GPU.

On a GPU the marks are CUDA events in the stream of the step, read after the GPU has passed them. `data` is then the time
for which the stream waited for the loader: 0 where a batch was ready, however long the Python thread waited. `h2d` is the
wait for the copy that follows, and `augment` is augmentation and normalisation on the device.

Shapes: S steps, T timed columns (the phases, then the whole step).
"""

import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from trainables.metrics.heartbeat import Heartbeat
from trainables.metrics.phases import ALL_PHASES, PHASES, RECEIVE

COLUMNS = (*ALL_PHASES, "step")
MAX_STEPS = 10_000
"""The latest steps, of which quantiles are; means, minima and maxima are exact over all steps."""
_MAX_PENDING = 256
_COLUMN = {phase: column for column, phase in enumerate(ALL_PHASES)}
_DATA, _STEP = _COLUMN["data"], len(ALL_PHASES)

Floats = npt.NDArray[np.float64]


class Clock:
    """The wall clock. Of other clocks a point in time may become readable only later."""

    def now(self) -> Any:
        """A point in time; costs about a microsecond."""
        return time.perf_counter()

    def ready(self, timestamp: Any) -> bool:
        """Whether `timestamp` can be read; never waits."""
        return True

    def ms_between(self, earlier: Any, later: Any) -> float:
        """Milliseconds from one point to another; both are ready."""
        return float(later - earlier) * 1e3

    def reuse(self, timestamps: Iterable[Any]) -> None:
        """The caller has read `timestamps` and will not use them again."""


class CudaClock(Clock):
    """Events in the current stream of `device`, from a pool: creating one costs more than recording one."""

    def __init__(self, device: torch.device):
        self._device = device
        self._free: list[torch.cuda.Event] = []

    def now(self) -> torch.cuda.Event:
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def ready(self, timestamp: torch.cuda.Event) -> bool:
        return bool(timestamp.query())  # type: ignore[no-untyped-call]

    def ms_between(self, earlier: torch.cuda.Event, later: torch.cuda.Event) -> float:
        return float(earlier.elapsed_time(later))

    def reuse(self, timestamps: Iterable[torch.cuda.Event]) -> None:
        self._free.extend(timestamps)


def clock_of(device: torch.device) -> Clock:
    """The clock of what runs on a device."""
    return CudaClock(device) if device.type == "cuda" else Clock()


class _Totals:
    """Exact sums, minima and maxima of all rows (T,) added, and the latest `MAX_STEPS` rows for quantiles."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.sum_T = np.zeros(len(COLUMNS))
        self.min_T = np.full(len(COLUMNS), np.inf)
        self.max_T = np.full(len(COLUMNS), -np.inf)
        self.latest: deque[Floats] = deque(maxlen=MAX_STEPS)

    def add(self, row_T: Floats) -> None:
        self.num_steps += 1
        self.sum_T += row_T
        np.minimum(self.min_T, row_T, out=self.min_T)
        np.maximum(self.max_T, row_T, out=self.max_T)
        self.latest.append(row_T)

    def summary(self) -> dict[str, float]:
        if not self.num_steps:
            return {}
        p50_T, p95_T = np.quantile(np.stack(self.latest), (0.5, 0.95), axis=0)
        columns_ST = (self.sum_T / self.num_steps, self.min_T, self.max_T, p50_T, p95_T)
        named = {
            f"phase/{name}{suffix}_ms": float(values_T[column])
            for column, name in enumerate(COLUMNS)
            if name in PHASES or name == "step" or self.sum_T[column]
            for suffix, values_T in zip(("", "_min", "_max", "_p50", "_p95"), columns_ST, strict=True)
        }
        if self.sum_T[_COLUMN[RECEIVE]]:  # it has no loader to wait for
            return named
        whole = float(self.sum_T[_STEP])
        return named | {"data_pct": 100 * float(self.sum_T[_DATA]) / whole if whole > 0 else 0.0}


class PhaseTimer:
    """Times the phases of each step of one training thread.

    A step is `start()`, then `mark(phase)` as each phase ends, then `stop()`. A phase runs from the mark before it, so the
    phases and the rest after the last mark add up to the step. A phase marked again (accumulated micro-batches) adds to
    itself; one that is not marked took 0. A second `start()` drops an unfinished step, as at an epoch's end.

    Args:
        device: the device whose time counts.
        warmup_steps: first steps that `summary()` leaves out; `take()` has them.
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
        self._pending: deque[tuple[list[Any], list[int]]] = deque()
        self._run, self._window = _Totals(), _Totals()

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
        self._pending.append((self._timestamps, self._columns))
        self._timestamps, self._columns = [], []
        if len(self._pending) >= _MAX_PENDING:
            self.collect()

    def collect(self) -> None:
        """Read the steps that the device has finished; the others stay for the next call. Never waits for the device."""
        while self._pending:
            timestamps, columns = self._pending[0]
            # One stream runs in order: where the last event is past, all are.
            if not self._clock.ready(timestamps[-1]):
                return
            self._pending.popleft()
            self._add(_row(self._clock, timestamps, columns))
            self._clock.reuse(timestamps)

    def _add(self, row_T: Floats) -> None:
        self._window.add(row_T)
        if self._warmup_left > 0:
            self._warmup_left -= 1
        else:
            self._run.add(row_T)

    def take(self) -> dict[str, float]:
        """Summary of the steps read since the last `take()`, in the names of `summary`."""
        self.collect()
        window, self._window = self._window, _Totals()
        return window.summary()

    def steps_s(self) -> list[float]:
        """Seconds of each step past the warm-up, the latest `MAX_STEPS` of them."""
        self.collect()
        return [float(row_T[_STEP]) / 1e3 for row_T in self._run.latest]

    def summary(self) -> dict[str, float]:
        """Mean, min, max, p50 and p95 of each phase and of `step`, in ms, and the share of data in the step, in percent.

        Named `phase/data_ms` (mean), `phase/data_min_ms`, `…_max_ms`, `…_p50_ms`, `…_p95_ms`, …, `phase/step_ms`, …, and
        `data_pct`. {} before the first step past the warm-up.
        """
        self.collect()
        return self._run.summary()


def _row(clock: Clock, timestamps: Sequence[Any], columns: Sequence[int]) -> Floats:
    """One step's times in ms (T,)."""
    row = [0.0] * len(COLUMNS)
    for column, earlier, later in zip(columns, timestamps, timestamps[1:], strict=False):
        row[column] += clock.ms_between(earlier, later)
    row[_STEP] = clock.ms_between(timestamps[0], timestamps[-1])
    return np.array(row)
