"""The memory that the CUDA graphs of a step read and write, for each shape of batch."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Self

import torch
from torch import Tensor

from trainables.device.device_batches import DeviceBatch
from trainables.device.mixing import Mix
from trainables.engine.static_outputs import StaticOutputs
from trainables.engine.step import TeacherOutputs
from trainables.engine.step_recording import StepRecording


class DeviceNumber:
    """A Python number in a tensor of the device, which is written where the number has changed."""

    def __init__(self, device: torch.device) -> None:
        self.tensor = torch.zeros((), device=device)
        self._value = 0.0

    def set(self, value: float) -> None:
        if value != self._value:
            self.tensor.fill_(value)
            self._value = value


class BatchShape(NamedTuple):
    """Of the tensors of a batch: steps of one shape are the same step."""

    images: tuple[int, ...]
    dtype: torch.dtype
    mixes: bool

    @classmethod
    def of(cls, batch: DeviceBatch) -> Self:
        return cls(tuple(batch.images_BCHW.shape), batch.images_BCHW.dtype, batch.mix is not None)


@dataclass(frozen=True)
class TeacherGraph:
    """A captured teacher, with the memory that it reads and writes."""

    images_BCHW: Tensor
    outputs: TeacherOutputs
    replay: Callable[[], None]

    def __call__(self, images_BCHW: Tensor) -> TeacherOutputs:
        self.images_BCHW.copy_(images_BCHW)
        self.replay()
        return self.outputs


class Replays(NamedTuple):
    """The parts of a step: a teacher in the side stream, what comes up to the gradients, and what is done with them."""

    teacher: TeacherGraph | None
    gradients: Callable[[], None]
    update: Callable[[], None]


@dataclass
class ShapeState:
    """What is known of the steps of one shape."""

    batch: DeviceBatch
    """The memory that they read."""
    sample_weight: Tensor
    """See `GlobalCount.weight`; on one rank it is a number that belongs to the shape, and this is not used."""
    sums_N: Tensor
    """What the last one added, see `StepSums.of_batch`."""
    teacher_outputs: StaticOutputs | None = None
    """What the student's part reads of a teacher in the side stream; None: it has the teacher in itself, or there is none."""
    epoch: int = -1
    """Of the last one that was not replayed."""
    num_steps: int = 0
    """Of that epoch, until one is captured: what comes once an epoch, as its last batch, is none."""
    recordings: list[StepRecording] = field(default_factory=list)
    """Of the parts of the last one that was compared with others."""
    replays: Replays | None = None

    @classmethod
    def of(cls, batch: DeviceBatch, num_sums: int) -> Self:
        """Memory for batches of this shape. `num_sums`: of `StepSums.of_batch`."""
        images_BCHW, labels_B, indices_B, *mix = (torch.empty_like(tensor) for tensor in _tensors(batch))
        memory = batch._replace(
            images_BCHW=images_BCHW, labels_B=labels_B, indices_B=indices_B, copied=None, mix=Mix(*mix) if mix else None
        )
        zeros = partial(torch.zeros, dtype=torch.float64, device=labels_B.device)
        return cls(memory, sample_weight=zeros(()), sums_N=zeros(num_sums))

    def load(self, batch: DeviceBatch) -> None:
        """Copy a batch to the memory."""
        for static, new in zip(_tensors(self.batch), _tensors(batch), strict=True):
            static.copy_(new)


def _tensors(batch: DeviceBatch) -> tuple[Tensor, ...]:
    return batch.images_BCHW, batch.labels_B, batch.indices_B, *(batch.mix or ())
