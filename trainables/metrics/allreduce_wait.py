"""How long a rank waits in its backward pass once its own gradients are ready: for the network, and for slower ranks."""

import math
from collections import deque
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainables.metrics.clock import clock_of

_MAX_STEPS = 1_000  # the latest ones, which ranks exchange at the end
_NUM_BATCHES = 8  # their means give the error of the whole mean


class AllreduceWait:
    """The time from a rank's last gradient to the end of the last all-reduce, of each step in which DDP averages gradients.

    All ranks wait for a slow network; only the fast ones wait for a slow rank. So the wait of the last rank of a step is the cost
    of the all-reduce itself (`exposed_ms`), and what a rank waits beyond that is because of other ranks.
    """

    def __init__(self, device: torch.device, *, warmup_steps: int) -> None:
        self._clock, self._warmup_steps = clock_of(device), warmup_steps
        self._gradients_ready: Any = None
        self._num_steps = 0
        self._pending: deque[tuple[int, Any, Any]] = deque()
        self.by_step: dict[int, float] = {}
        """Milliseconds, by the number of the step from 1; past the warm-up, the latest 1,000."""

    def backward(self, total: Tensor) -> None:
        """The backward pass of a loss (scalar) in which DDP averages the gradients over ranks.

        Autograd's engine calls back in the order in which it was asked: this asks when the pass begins, DDP when its last bucket
        is on its way, to wait there for all of them.
        """

        def gradients_ready() -> None:
            self._gradients_ready = self._clock.now()

        engine = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]
        total.register_hook(lambda _: engine.queue_callback(gradients_ready))  # type: ignore[no-untyped-call]
        total.backward()  # type: ignore[no-untyped-call]
        self._num_steps += 1
        if self._num_steps > self._warmup_steps:
            self._pending.append((self._num_steps, self._gradients_ready, self._clock.now()))

    def collect(self) -> None:
        """Read the steps that the device has finished; never waits for it."""
        while self._pending and self._clock.ready(self._pending[0][2]):
            step, gradients_ready, averaged = self._pending.popleft()
            self.by_step[step] = self._clock.ms_between(gradients_ready, averaged)
            self._clock.reuse((gradients_ready, averaged))
            if len(self.by_step) > _MAX_STEPS:
                self.by_step.pop(next(iter(self.by_step)))

    def summary(self) -> dict[str, float]:
        """`phase/allreduce_wait_ms`, a part of `phase/backward_ms`: the mean over the steps past the warm-up. With two steps or
        more `phase/allreduce_wait_error_ms` too, the mean's standard error. {} where DDP averaged in none of them.
        """
        self.collect()
        if not self.by_step:
            return {}
        waits_ms = list(self.by_step.values())
        found = {"phase/allreduce_wait_ms": fmean(waits_ms)}
        if len(waits_ms) > 1:
            found["phase/allreduce_wait_error_ms"] = standard_error(waits_ms)
        return found


def exposed_ms(by_rank: Sequence[Mapping[int, float]]) -> float | None:
    """How long all ranks wait for the all-reduce itself: the least wait of any in the median step, from each rank's `by_step`.

    A mean would have the steps in which another program delayed all ranks. None without a step that all have timed.
    """
    steps = set.intersection(*(set(waits) for waits in by_rank)) if by_rank else set()
    return median(min(waits[step] for waits in by_rank) for step in steps) if steps else None


def standard_error(values: Sequence[float]) -> float:
    """Of the mean of values that came one after the other, at least two: by the means of consecutive batches of them.

    A disturbed machine delays a rank for many steps on end, so that steps are no independent samples; batches nearly are
    (Law and Kelton, "Simulation Modeling and Analysis", on the method of batch means).
    """
    batches = np.array_split(np.asarray(values), min(_NUM_BATCHES, len(values)))
    return float(np.std([batch.mean() for batch in batches], ddof=1)) / math.sqrt(len(batches))
