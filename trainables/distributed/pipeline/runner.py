"""Runs one rank's stage of a pipeline: micro-batches forward and backward by a schedule of `torch.distributed.pipelining`.

Shapes: B samples of a replica's batch, S samples of a micro-batch, C channels, H W pixels, K classes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from trainables.distributed.group import Group, gather_objects

Forward = Callable[[Tensor], Tensor]
"""From what a stage receives of a micro-batch (S, …) to what it sends on; of the last stage to what comes out of the pipeline."""
Mark = Callable[[str], None]
"""Is called at the end of what the rank does: `student` for a forward pass, `backward`, and `bubble` for waiting in between."""


def _stage_inputs(forward: Forward, images_BCHW: Tensor, stages: Group) -> list[Tensor]:
    """What each stage receives of two images, on the meta device: one after the other passes blank ones on."""
    inputs = [images_BCHW.to("meta")]
    for index in range(stages.world_size - 1):
        sent = None
        if index == stages.rank:
            with torch.no_grad():
                sent = forward(torch.zeros(inputs[-1].shape, dtype=inputs[-1].dtype, device=stages.device)).to("meta")
        inputs.append(gather_objects(sent, stages)[index])
    return inputs


class PipelineRunner(nn.Module):
    """One rank's stage, which torch's schedules call for each micro-batch, and the schedules that have run it."""

    def __init__(self, forward: Forward, images_BCHW: Tensor, stages: Group, schedule: str) -> None:
        """`images_BCHW`: two, of which the shape counts; `schedule`: of training. Every rank calls it, its stage in eval mode."""
        super().__init__()
        self._stages, self._stage_forward, self._schedule = stages, forward, schedule
        self._inputs = _stage_inputs(forward, images_BCHW, stages)
        self._built: dict[tuple[int, int, bool], tuple[_TimedStage, PipelineScheduleSingle]] = {}
        self.is_first, self.is_last = stages.rank == 0, stages.rank == stages.world_size - 1

    def run(
        self,
        images_BCHW: Tensor,
        num_micro_batches: int,
        *,
        loss: Forward | None = None,
        training: bool = True,
        mark: Mark = lambda phase: None,
    ) -> Tensor | None:
        """Forward and, in training, backward of a batch; gradients are added to the parameters'.

        Micro-batches differ by one sample at most, the larger ones come first. None is empty. Only the number of images counts on
        other stages than the first. In training the last one has `loss`, from what it receives to the loss (a scalar) of each
        micro-batch, in their order; else it returns its output for the whole batch.
        """
        parts = images_BCHW.tensor_split(min(len(images_BCHW), num_micro_batches))
        stage, schedule = self._schedule_for(len(parts), len(parts[0]), training)
        self._pass, self._parts, self._largest = loss or self._stage_forward, iter(parts), len(parts[0])
        self._mark = stage.mark = mark
        # Torch divides what it is given evenly: numbers, for which `forward` takes the images. Without a target for each
        # micro-batch it does not ask for its loss, which is the last stage's output already.
        numbers = torch.arange(len(parts))
        arguments, target = [numbers] if self.is_first else [], numbers if self.is_last and training else None
        try:
            with torch.set_grad_enabled(training):
                output: Tensor | None = schedule.step(*arguments, target=target, return_outputs=not training)
        except RuntimeError as error:
            if error.__cause__ is None:
                raise
            raise error.__cause__ from None  # torch wraps it, with the tensors it was called with
        # What it received, and what the loss refers to, would stay in memory until the next run.
        stage.clear_runtime_states()
        del self._pass, self._parts
        mark("bubble")
        return output

    def forward(self, received: Tensor) -> Tensor:
        """What torch calls for each micro-batch, in their order.

        Torch's schedules send tensors of one shape. A smaller micro-batch has a row more on its way, which no module gets: batch
        norm sees samples only.
        """
        self._mark("bubble")
        part = next(self._parts)
        sent = self._pass(part if self.is_first else received[: len(part)])
        if not self.is_last and len(part) < self._largest:
            sent = F.pad(sent, (0, 0) * (sent.ndim - 1) + (0, self._largest - len(part)))
        self._mark("student")
        return sent.contiguous()  # a permuted or channels_last tensor cannot be sent

    def _schedule_for(self, number: int, size: int, training: bool) -> tuple[_TimedStage, PipelineScheduleSingle]:
        if (number, size, training) not in self._built:
            index, num_stages = self._stages.rank, self._stages.world_size
            # The first stage receives the number of a micro-batch. What the last one gives is sent to none.
            tensors = [torch.empty(1, dtype=torch.int64, device="meta"), *(_sized(each, size) for each in self._inputs[1:])]
            sent = tensors[min(index + 1, num_stages - 1)]
            device, group = self._stages.device, self._stages.process_group
            stage = _TimedStage(self, index, num_stages, device, input_args=tensors[index], output_args=sent, group=group)
            # 1F1B refuses fewer micro-batches than stages; it would run them in GPipe's order.
            kind = get_schedule_class(self._schedule if training and number >= num_stages else "gpipe")
            loss = (lambda output, target: output) if training else None
            self._built[number, size, training] = stage, kind(stage, number, loss_fn=loss, scale_grads=False)
        return self._built[number, size, training]


def _sized(input: Tensor, num_samples: int) -> Tensor:
    return input.new_empty((num_samples, *input.shape[1:])).requires_grad_()


class _TimedStage(PipelineStage):
    """Marks the ends of its backward passes, and of the waiting before them."""

    mark: Mark

    def backward_one_chunk(self, *arguments: Any, **options: Any) -> None:
        self.mark("bubble")
        super().backward_one_chunk(*arguments, **options)
        self.mark("backward")
