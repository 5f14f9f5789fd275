"""Runs one rank's stage of a pipeline: micro-batches forward and backward by a schedule of `torch.distributed.pipelining`.

Shapes: B samples of a replica's batch, S samples of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

SCHEDULES: dict[str, type[PipelineScheduleSingle]] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}

MicroBatchLoss = Callable[[Tensor, Tensor], Tensor]
"""From the logits (S, K) of a micro-batch and the positions (S,) of its samples in the batch to a scalar to differentiate."""


@dataclass(frozen=True)
class Boundary:
    """What crosses a cut, for one sample."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    has_gradient: bool = True
    """The images have none."""

    def of_samples(self, num_samples: int) -> Tensor:
        """A micro-batch's tensor without memory."""
        return torch.empty((num_samples, *self.shape), dtype=self.dtype, device="meta", requires_grad=self.has_gradient)


def micro_batch_runs(num_samples: int, num_micro_batches: int) -> list[tuple[int, int]]:
    """(number, samples of each) of equal micro-batches, in order: at most two runs of a schedule, which wants equal ones.

    No sample is padded: batch norm sees samples only.
    """
    size = -(-num_samples // num_micro_batches)
    whole, rest = divmod(num_samples, size)
    return [(whole, size)] + ([(1, rest)] if rest else [])


class PipelineRunner:
    """One rank's stage, and the schedules that have run it."""

    def __init__(
        self,
        stage: nn.Module,
        *,
        group: dist.ProcessGroup,
        boundaries: tuple[Boundary, ...],
        schedule: str,
        device: torch.device,
    ) -> None:
        """`boundaries`: of the images, of each cut, and of the logits: one more than there are stages.

        `group`: the ranks of this replica, one a stage, in order.
        """
        self._stage, self._group, self._boundaries = stage, group, boundaries
        self._schedule, self._device = SCHEDULES[schedule], device
        self._built: dict[tuple[int, int], PipelineScheduleSingle] = {}
        self._loss: MicroBatchLoss | None = None
        self.index = dist.get_rank(group)
        self.num_stages = len(boundaries) - 1

    @property
    def is_first(self) -> bool:
        return self.index == 0

    @property
    def is_last(self) -> bool:
        return self.index == self.num_stages - 1

    def step(self, images_BCHW: Tensor | None, num_samples: int, num_micro_batches: int, loss: MicroBatchLoss) -> None:
        """Forward and backward of a batch; gradients are added to the parameters'.

        The first stage gives `images_BCHW`; `loss` is called on the last one.
        """
        self._loss = loss
        first = 0
        for number, size in micro_batch_runs(num_samples, num_micro_batches):
            end = first + number * size
            schedule = self._built_for(number, size)
            inputs = (images_BCHW[first:end],) if images_BCHW is not None and self.is_first else ()
            positions = torch.arange(first, end) if self.is_last else None
            schedule.step(*inputs, target=positions, return_outputs=False)
            first = end
        self._loss = None

    def _built_for(self, number: int, size: int) -> PipelineScheduleSingle:
        if (number, size) not in self._built:
            stage = PipelineStage(
                self._stage,
                self.index,
                self.num_stages,
                self._device,
                input_args=self._boundaries[self.index].of_samples(size),
                output_args=self._boundaries[self.index + 1].of_samples(size),
                group=self._group,
            )
            # 1F1B refuses fewer micro-batches than stages; it would run them in GPipe's order.
            schedule = self._schedule if number >= self.num_stages else ScheduleGPipe
            self._built[number, size] = schedule(stage, number, loss_fn=self._call_loss, scale_grads=False)
        return self._built[number, size]

    def _call_loss(self, output: Tensor, positions: Tensor) -> Tensor:
        assert self._loss is not None
        return self._loss(output, positions)
