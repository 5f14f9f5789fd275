"""A line of a training's log, while its numbers are on their way from the device."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainables.metrics.phase_timer import StepTimes
from trainables.metrics.throughput import Window


class ToHost:
    """Tensors on their way to the host."""

    def __init__(self, *tensors: Tensor) -> None:
        self._copies = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
        self._copied = None
        if tensors[0].is_cuda:
            self._copied = torch.cuda.Event()
            self._copied.record(torch.cuda.current_stream(tensors[0].device))

    def lists(self) -> list[list[Any]]:
        """Their values; waits for the copies."""
        if self._copied is not None:
            self._copied.synchronize()  # type: ignore[no-untyped-call]
        return [copy.tolist() for copy in self._copies]


class PendingLine(NamedTuple):
    """What a line says of the steps since the one before."""

    step: int
    """The number of steps so far."""
    step_in_epoch: int
    lr: float
    window: Window
    phases: StepTimes
    sums: ToHost
    """Over all ranks: what the steps have added up, and the checksums of the replicas."""
