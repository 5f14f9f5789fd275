"""Measure how long a rank waits in the backward phase for the network and for late ranks."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainables.metrics.clock import clock_of

_MAX_STEPS = 1_000  # latest steps, which ranks exchange at the end
_NUM_BATCHES = 8  # batch means for the standard error


class AllreduceWait:
    """Measures how long a rank waits for others in the backward phase of each step.

    It waits from its last gradient to the end of the last all-reduce, and before that for the step's number of samples, if
    unknown. All ranks wait for a slow network, but only the early ones for a late rank: see `split_waits`.
    """

    def __init__(self, device: torch.device, *, warmup_steps: int) -> None:
        self._clock, self._warmup_left = clock_of(device), warmup_steps
        self._began: Any = None
        self._intervals: list[tuple[Any, Any]] = []
        self._num_steps = 0
        self._pending: deque[tuple[int, list[tuple[Any, Any]]]] = deque()
        self.by_step: dict[int, float] = {}
        """Step number → ms, for the latest 1,000 steps past the warm-up."""

    def begin(self) -> None:
        """Begin a wait."""
        self._began = self._clock.now()

    def begin_after(self, total: Tensor) -> None:
        """Begin a wait once the backward pass of a loss (scalar) has computed this rank's gradients, while DDP averages them.

        Autograd's engine runs callbacks in the order they are queued: this one when the pass begins, and DDP's, which waits for
        all buckets, when the last bucket is sent.
        """
        engine = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]
        total.register_hook(lambda _: engine.queue_callback(self.begin))  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """End the wait."""
        self._intervals.append((self._began, self._clock.now()))

    def end_step(self) -> None:
        self._num_steps += 1
        intervals, self._intervals = self._intervals, []
        if self._warmup_left > 0:
            self._warmup_left -= 1
        elif intervals:
            self._pending.append((self._num_steps, intervals))

    def collect(self) -> None:
        """Read the steps that the device has finished, without waiting for it."""
        while self._pending and self._clock.ready(self._pending[0][1][-1][1]):
            step, intervals = self._pending.popleft()
            wait_ms = sum(self._clock.ms_between(*interval) for interval in intervals)
            for interval in intervals:
                self._clock.reuse(interval)
            self.by_step[step] = wait_ms
            if len(self.by_step) > _MAX_STEPS:
                self.by_step.pop(next(iter(self.by_step)))

    def summary(self) -> dict[str, float]:
        """Return `phase/allreduce_wait_ms`, a part of `phase/backward_ms`: the mean over the latest 1,000 steps past warm-up.

        With two or more steps, `phase/allreduce_wait_error_ms` is its standard error. {} if DDP averaged in no step.
        """
        self.collect()
        if not self.by_step:
            return {}
        waits_ms = list(self.by_step.values())
        found = {"phase/allreduce_wait_ms": fmean(waits_ms)}
        if len(waits_ms) > 1:
            found["phase/allreduce_wait_error_ms"] = standard_error(waits_ms)
        return found


def split_waits(by_rank: Sequence[Mapping[int, float]]) -> tuple[float | None, list[float]]:
    """Split the waits of all ranks, given each one's `by_step`, into ms per step for the network, and for other ranks by rank.

    The last rank to reach a step's all-reduce has the minimum wait, which is for the network only. The network's time is the
    median of these minima, since a mean would include steps in which another program delayed all ranks. A rank's wait for
    others is its mean excess over the minima: a late rank waits little, an early one long. None and [] if there is no step
    that all ranks have timed.
    """
    steps = sorted(set.intersection(*(set(waits) for waits in by_rank))) if by_rank else []
    if not steps:
        return None, []
    waits_RS = np.array([[waits[step] for step in steps] for waits in by_rank])
    min_S = waits_RS.min(axis=0)
    return float(np.median(min_S)), (waits_RS - min_S).mean(axis=1).tolist()


def standard_error(values: Sequence[float]) -> float:
    """Return the standard error of the mean of two or more consecutive values, by the method of batch means.

    Other load delays a rank for many steps in a row, so steps are not independent samples, but batches of them nearly are
    (Law and Kelton, "Simulation Modeling and Analysis").
    """
    batches = np.array_split(np.asarray(values), min(_NUM_BATCHES, len(values)))
    return float(np.std([batch.mean() for batch in batches], ddof=1)) / math.sqrt(len(batches))
