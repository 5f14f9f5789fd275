"""How long a rank waits for others in the backward phase: for the network, and for late ranks."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainables.metrics.clock import clock_of

_MAX_STEPS = 1_000  # the latest ones, which ranks exchange at the end
_NUM_BATCHES = 8  # their means give the error of the whole mean


class AllreduceWait:
    """How long a rank waits for others in the backward phase of each step: from its last gradient to the end of the last
    all-reduce, and before that for the number of samples of the step, where it is not known.

    All ranks wait for a slow network; only the early ones wait for a late rank. See `split_waits`.
    """

    def __init__(self, device: torch.device, *, warmup_steps: int) -> None:
        self._clock, self._warmup_left = clock_of(device), warmup_steps
        self._began: Any = None
        self._intervals: list[tuple[Any, Any]] = []
        self._num_steps = 0
        self._pending: deque[tuple[int, list[tuple[Any, Any]]]] = deque()
        self.by_step: dict[int, float] = {}
        """Milliseconds, by the number of the step; past the warm-up, the latest 1,000."""

    def begin(self) -> None:
        """A wait begins."""
        self._began = self._clock.now()

    def begin_after(self, total: Tensor) -> None:
        """A wait begins once the backward pass of a loss (scalar) has this rank's gradients, while DDP averages them.

        Autograd's engine runs callbacks in the order in which they were queued: this one when the pass begins, DDP's, which waits
        for all buckets, when the last bucket is on its way.
        """
        engine = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]
        total.register_hook(lambda _: engine.queue_callback(self.begin))  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """The wait ends."""
        self._intervals.append((self._began, self._clock.now()))

    def end_step(self) -> None:
        self._num_steps += 1
        intervals, self._intervals = self._intervals, []
        if self._warmup_left > 0:
            self._warmup_left -= 1
        elif intervals:
            self._pending.append((self._num_steps, intervals))

    def collect(self) -> None:
        """Read the steps that the device has finished; never waits for it."""
        while self._pending and self._clock.ready(self._pending[0][1][-1][1]):
            step, intervals = self._pending.popleft()
            wait_ms = sum(self._clock.ms_between(*interval) for interval in intervals)
            for interval in intervals:
                self._clock.reuse(interval)
            self.by_step[step] = wait_ms
            if len(self.by_step) > _MAX_STEPS:
                self.by_step.pop(next(iter(self.by_step)))

    def summary(self) -> dict[str, float]:
        """`phase/allreduce_wait_ms`, a part of `phase/backward_ms`: the mean over the latest 1,000 steps past the warm-up. With
        two or more `phase/allreduce_wait_error_ms` too, the mean's standard error. {} where DDP averaged in none of them.
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
    """What ranks wait for, from each one's `by_step`: the network, in ms of a step; and each rank for other ranks, in ms.

    The rank that comes last to a step's all-reduce waits for the network alone: the least wait of any. The network's is that of
    the median step, since a mean would have the steps in which another program delayed all ranks; what a rank waits beyond each
    step's least is a mean. A late rank waits little, an early one long. None and [] without a step that all have timed.
    """
    steps = sorted(set.intersection(*(set(waits) for waits in by_rank))) if by_rank else []
    if not steps:
        return None, []
    waits_RS = np.array([[waits[step] for step in steps] for waits in by_rank])
    least_S = waits_RS.min(axis=0)
    return float(np.median(least_S)), (waits_RS - least_S).mean(axis=1).tolist()


def standard_error(values: Sequence[float]) -> float:
    """The standard error of the mean of consecutive values, at least two, by the means of consecutive batches of them.

    A disturbed machine delays a rank for many steps on end, so that steps are no independent samples; batches nearly are
    (Law and Kelton, "Simulation Modeling and Analysis", on the method of batch means).
    """
    batches = np.array_split(np.asarray(values), min(_NUM_BATCHES, len(values)))
    return float(np.std([batch.mean() for batch in batches], ddof=1)) / math.sqrt(len(batches))
