"""What a block of a model costs, what connects its devices, and what a plan makes of both: plain values."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


@dataclass(frozen=True)
class PassTime:
    """Seconds of a pass as measured for some numbers of samples, in rising order.

    Between them straight lines; beyond them the slope from the first to the last, which noise changes least, and never falling.
    """

    num_samples: tuple[int, ...]
    times_s: tuple[float, ...]

    def seconds(self, num_samples: float) -> float:
        sizes, times_s = self.num_samples, self.times_s
        if len(sizes) == 1:
            return times_s[0] * num_samples / sizes[0]
        if sizes[0] <= num_samples <= sizes[-1]:
            return float(np.interp(num_samples, sizes, times_s))
        slope_s = max(0.0, (times_s[-1] - times_s[0]) / (sizes[-1] - sizes[0]))
        nearest = 0 if num_samples < sizes[0] else -1
        return max(0.0, times_s[nearest] + slope_s * (num_samples - sizes[nearest]))


@dataclass(frozen=True)
class Block:
    """What lies between two neighbouring cut points."""

    begins_at: str
    """The module that names the cut before it; empty for the first block."""
    forward: PassTime
    backward: PassTime
    parameter_bytes: int
    activation_bytes: float
    """Of one sample, stored from the forward to the backward pass; of a frozen teacher, the most at a time in its forward."""
    output_bytes: float
    """Of one sample: what crosses a cut after the block."""


@dataclass(frozen=True)
class Link:
    """What carries a tensor from a stage to the next. By default that of GPUs of one node."""

    latency_s: float = 20e-6
    bytes_per_s: float = 20e9
    overlapped: bool = True
    """Whether it runs beside the passes, as copies of a GPU do. Gloo takes the processor from them."""

    def seconds(self, num_bytes: float) -> float:
        return self.latency_s + num_bytes / self.bytes_per_s


def usual_link(device_type: str) -> Link:
    """Of a kind of devices, where nothing was measured."""
    return Link() if device_type == "cuda" else Link(latency_s=2e-4, bytes_per_s=2e9, overlapped=False)


@dataclass(frozen=True)
class Devices:
    """The stages' devices and what connects them."""

    num_stages: int
    num_replicas: int = 1
    link: Link = Link()
    all_reduce_bytes_per_s: float = 10e9
    """Of a stage's gradients over the replicas."""
    memory_bytes: float = math.inf
    parameter_copies: float = 3.0
    """A parameter, its gradient and the optimizer's state, in copies of the parameter."""

    def all_reduce_s(self, gradient_bytes: float) -> float:
        """A ring's: each device sends and receives 2 (n - 1)/n of the gradients."""
        return 2 * (self.num_replicas - 1) / self.num_replicas * gradient_bytes / self.all_reduce_bytes_per_s


@dataclass(frozen=True)
class Stage:
    """What the plan expects of one stage."""

    begins_at: str
    forward_s: float
    """Of one micro-batch."""
    backward_s: float
    teacher_s: float
    """Of the teacher, for one micro-batch; 0 before the last stage, and without a teacher."""
    parameter_bytes: int
    """Of the student."""
    memory_bytes: float
    """Of the student's part and, on the last stage, the teacher."""
    sent_bytes: float
    """Of one micro-batch over the cut after it, in either direction; 0 for the last stage."""


@dataclass(frozen=True)
class Plan:
    """Where to cut, into how many micro-batches a replica's batch is divided, and the step that is expected."""

    stages: tuple[Stage, ...]
    schedule: str
    num_micro_batches: int
    step_s: float
    bubble: float
    """The share of a step in which the stages wait, in the mean."""

    @property
    def cuts(self) -> tuple[str, ...]:
        """Names for `stage_module.split`."""
        return tuple(stage.begins_at for stage in self.stages[1:])


class Sums:
    """Costs of runs of blocks for a number of samples."""

    def __init__(self, blocks: Sequence[Block], num_samples: int) -> None:
        self._forward_s = _sums([block.forward.seconds(num_samples) for block in blocks])
        self._backward_s = _sums([block.backward.seconds(num_samples) for block in blocks])
        self._parameters = _sums([block.parameter_bytes for block in blocks])
        self._activations = _sums([block.activation_bytes for block in blocks])
        self._sent = [num_samples * block.output_bytes for block in blocks]
        self.count = len(blocks)

    def forward_s(self, first: int, end: int) -> float:
        return self._forward_s[end] - self._forward_s[first]

    def backward_s(self, first: int, end: int) -> float:
        return self._backward_s[end] - self._backward_s[first]

    def all_parts_s(self) -> Array:
        """Forward and backward, by the first block and the block after the last; without end where that is none."""
        sums_s = np.array(self._forward_s) + np.array(self._backward_s)
        return np.where(np.tri(self.count + 1, dtype=bool), math.inf, sums_s - sums_s[:, None])

    def parameter_bytes(self, first: int, end: int) -> int:
        return round(self._parameters[end] - self._parameters[first])

    def activation_bytes(self, first: int, end: int) -> float:
        """Of one sample."""
        return self._activations[end] - self._activations[first]

    def sent_bytes(self, end: int) -> float:
        """Over the cut before a block; nothing leaves the last one."""
        return self._sent[end - 1] if end < self.count else 0.0


def _sums(values: Sequence[float]) -> list[float]:
    return [0.0, *accumulate(values)]
