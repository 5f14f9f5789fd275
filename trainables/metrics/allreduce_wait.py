"""How long a rank waits in its backward pass once its own gradients are ready: for the network, and for slower ranks."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from trainables.metrics.phase_timer import MAX_STEPS

_NUM_BATCHES = 8  # their means give the error of the whole mean


class AllreduceClocks(ABC):
    """The clocks of an update's all-reduce, which run in every step. To read them may wait for the device."""

    @abstractmethod
    def read(self) -> tuple[int, float] | None:
        """The number of the last step, from 1, and the milliseconds from this rank's last gradient to the end of the last
        all-reduce; None: no step was timed."""


class _UnreadLogger:
    """DDP's logger, whose clocks DDP's forward pass does not read."""

    def __init__(self, logger: Any) -> None:
        self.logger = logger

    def set_runtime_stats_and_log(self) -> None:
        """See `DdpClocks.read`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.logger, name)


class DdpClocks(AllreduceClocks):
    """Those behind DDP's logging data (Li et al. 2020, "PyTorch Distributed"). DDP itself would read them, and so wait for the
    device, at the beginning of its first ten steps and then once in a while."""

    def __init__(self, ddp_module: DistributedDataParallel) -> None:
        self._ddp = ddp_module
        ddp_module._set_ddp_runtime_logging_sample_rate(1)
        ddp_module.logger = self._logger = _UnreadLogger(ddp_module.logger)

    def read(self) -> tuple[int, float] | None:
        self._logger.logger.set_runtime_stats_and_log()
        data = self._ddp._get_ddp_logging_data()
        if "backward_comm_time" not in data:
            return None
        exposed_ns = int(data["backward_comm_time"]) - int(data["backward_compute_comm_overlap_time"])
        return int(data.get("iteration", 0)), exposed_ns / 1e6


class AllreduceWait:
    """Samples the clocks of an update: the time from a rank's last gradient to the end of the last all-reduce.

    All ranks wait for a slow network; only the fast ones wait for a slow rank. So the wait of the last rank of a step is the cost
    of the all-reduce itself (`exposed_ms`), and what a rank waits beyond that is because of other ranks.

    The clocks are read where nothing is left to wait for: on a GPU at a log line, on a CPU, where it costs some 10 µs, after each
    step.
    """

    def __init__(self, clocks: AllreduceClocks | None, device: torch.device, *, warmup_steps: int) -> None:
        """`clocks`: None where ranks reduce nothing, or nothing times it."""
        self._clocks = clocks
        self._each_step, self._last_step = device.type != "cuda", warmup_steps
        self.by_step: dict[int, float] = {}
        """Milliseconds, the latest `MAX_STEPS` samples."""

    def end_step(self) -> None:
        if self._each_step:
            self.sample()

    def sample(self) -> None:
        """Read the clocks of the last step; its device is idle."""
        read = self._clocks.read() if self._clocks is not None else None
        if read is None or read[0] <= self._last_step:  # of the warm-up, or read before
            return
        self._last_step, wait_ms = read
        self.by_step[self._last_step] = wait_ms
        if len(self.by_step) > MAX_STEPS:
            self.by_step.pop(next(iter(self.by_step)))

    def summary(self) -> dict[str, float]:
        """`phase/allreduce_wait_ms`, a part of `phase/backward_ms`: the mean over the samples past the warm-up. With
        two samples or more `phase/allreduce_wait_error_ms` too, the mean's standard error. {} where there are none.
        """
        if not self.by_step:
            return {}
        waits_ms = list(self.by_step.values())
        found = {"phase/allreduce_wait_ms": fmean(waits_ms)}
        if len(waits_ms) > 1:
            found["phase/allreduce_wait_error_ms"] = standard_error(waits_ms)
        return found


def exposed_ms(by_rank: Sequence[Mapping[int, float]]) -> float | None:
    """How long all ranks wait for the all-reduce itself: the least wait of any in the median step, from each rank's `by_step`.

    A mean would have the steps in which another program delayed all ranks. None without a step that all have sampled.
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
