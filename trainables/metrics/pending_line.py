"""A log line whose numbers are still on their way from the device."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainables.metrics.phase_timer import StepTimes
from trainables.metrics.throughput import Window


class ToHost:
    """Asynchronous copies of tensors to the host."""

    def __init__(self, *tensors: Tensor) -> None:
        self._copies = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
        self._copied = None
        if tensors[0].is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(tensors[0].device))

    def lists(self) -> list[list[Any]]:
        """Wait for the copies and return their values."""
        if self._copied is not None:
            self._copied.synchronize()  # type: ignore[no-untyped-call]
        return [copy.tolist() for copy in self._copies]


class PendingLine(NamedTuple):
    """The contents of a log line, about the steps since the previous one."""

    step: int
    """Number of steps so far."""
    step_in_epoch: int
    lr: float
    window: Window
    phases: StepTimes
    sums: ToHost
    """Over all ranks: the sums of the steps, and the checksums of the replicas."""
