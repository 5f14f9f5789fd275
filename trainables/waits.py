"""What a rank waits in its backward pass once its own gradients are ready: for the network, and for slower ranks."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import fmean, median

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainables.timing import KEEP_STEPS

_BATCHES = 8  # whose means tell the error of the whole mean


class AllreduceWait:
    """Samples DDP's own clocks: the time from a rank's last gradient to the end of the last all-reduce.

    All ranks wait for a slow network; only the fast ones wait for a slow rank. So the least of all ranks' waits is what the
    all-reduce itself costs, and what a rank waits beyond that is other ranks' fault. The median leaves out ranks that are late
    now and then.

    The clocks are those behind DDP's logging data (Li et al. 2020, "PyTorch Distributed"), which torch reads for its first ten
    steps and then once in a while. On a GPU a sample waits for the device, as a log line does, and is taken as rarely; on a CPU,
    where it costs some 10 µs, in each step.
    """

    def __init__(self, student: nn.Module, device: torch.device, log_every: int, warmup_steps: int) -> None:
        self._ddp = student if isinstance(student, DistributedDataParallel) else None
        self._every = log_every if device.type == "cuda" else 1
        self._steps, self._last = 0, warmup_steps
        self._waits_ms: deque[float] = deque(maxlen=KEEP_STEPS)
        if self._ddp is not None:
            self._ddp._set_ddp_runtime_logging_sample_rate(self._every)

    def note(self) -> None:
        """After each step: take up the latest sample, once a few steps."""
        self._steps += 1
        if self._ddp is None or self._steps % self._every:
            return
        found = self._ddp._get_ddp_logging_data()
        step = int(found.get("iteration", 0))
        if step <= self._last or "backward_comm_time" not in found:  # one of the warm-up, or seen before
            return
        self._last = step
        exposed_ns = int(found["backward_comm_time"]) - int(found["backward_compute_comm_overlap_time"])
        self._waits_ms.append(exposed_ns / 1e6)

    def summary(self) -> dict[str, float]:
        """`phase/allreduce_wait_ms`, a part of `phase/backward_ms`: the mean over the samples past the warm-up, and its p50.

        With two samples or more `phase/allreduce_wait_error_ms` too, the mean's standard error. {} where there are none.
        """
        if not self._waits_ms:
            return {}
        found = {"phase/allreduce_wait_ms": fmean(self._waits_ms), "phase/allreduce_wait_p50_ms": median(self._waits_ms)}
        if len(self._waits_ms) > 1:
            found["phase/allreduce_wait_error_ms"] = standard_error(self._waits_ms)
        return found


def standard_error(values: Sequence[float]) -> float:
    """Of the mean of values that came one after the other, at least two: by the means of consecutive batches of them.

    A disturbed machine delays a rank for many steps on end, so that steps are no independent samples; batches nearly are
    (Law and Kelton, "Simulation Modeling and Analysis", on the method of batch means).
    """
    batches = np.array_split(np.asarray(values), min(_BATCHES, len(values)))
    return float(np.std([batch.mean() for batch in batches], ddof=1)) / math.sqrt(len(batches))
