"""Run one rank's pipeline stage on micro-batches, with a schedule of `torch.distributed.pipelining`.

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
"""Maps a stage's input for a micro-batch (S, …) to what it sends on; on the last stage, to the output of the pipeline."""
Mark = Callable[[str], None]
"""Called at the end of each activity: `student` (a forward pass), `backward`, and `bubble` (waiting in between)."""


def _stage_inputs(forward: Forward, images_BCHW: Tensor, stages: Group) -> list[Tensor]:
    """Return each stage's input for two images, on the meta device, by passing blank images through the stages."""
    inputs = [images_BCHW.to("meta")]
    for index in range(stages.world_size - 1):
        sent = None
        if index == stages.rank:
            with torch.no_grad():
                sent = forward(torch.zeros(inputs[-1].shape, dtype=inputs[-1].dtype, device=stages.device)).to("meta")
        inputs.append(gather_objects(sent, stages)[index])
    return inputs


class PipelineRunner(nn.Module):
    """One rank's stage, which torch's schedules call for each micro-batch."""

    def __init__(self, forward: Forward, images_BCHW: Tensor, stages: Group, schedule: str) -> None:
        """`images_BCHW` are two images that give the shape, `schedule` is for training. Every rank calls this in eval mode."""
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
        """Run forward and, in training, backward on a batch, adding to the parameters' gradients.

        Micro-batches differ by one sample at most, larger ones come first, and none is empty. On stages after the first, only
        the number of images counts. In training, the last stage passes `loss`, which maps its input for each micro-batch, in
        order, to a scalar loss. Otherwise the last stage returns its output for the whole batch.
        """
        parts = images_BCHW.tensor_split(min(len(images_BCHW), num_micro_batches))
        stage, schedule = self._schedule_for(len(parts), len(parts[0]), training)
        self._pass, self._parts, self._largest = loss or self._stage_forward, iter(parts), len(parts[0])
        self._mark = stage.mark = mark
        # Torch chunks its arguments evenly, so pass one index per micro-batch, and `forward` takes the images. The target only
        # makes torch compute a loss, which the last stage's output already is.
        numbers = torch.arange(len(parts))
        arguments, target = [numbers] if self.is_first else [], numbers if self.is_last and training else None
        try:
            with torch.set_grad_enabled(training):
                output: Tensor | None = schedule.step(*arguments, target=target, return_outputs=not training)
        except RuntimeError as error:
            if error.__cause__ is None:
                raise
            raise error.__cause__ from None  # torch wraps the error and dumps its tensors
        # Otherwise inputs and what the loss refers to would stay in memory until the next run.
        stage.clear_runtime_states()
        del self._pass, self._parts
        mark("bubble")
        return output

    def forward(self, received: Tensor) -> Tensor:
        """Run the stage on the next micro-batch; torch calls this.

        Torch's schedules send tensors of one shape, so a smaller micro-batch is padded by a row, which is removed before any
        module, such as batch norm, sees it.
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
            # The first stage receives the index of a micro-batch. The output of the last one is not sent.
            tensors = [torch.empty(1, dtype=torch.int64, device="meta"), *(_sized(each, size) for each in self._inputs[1:])]
            sent = tensors[min(index + 1, num_stages - 1)]
            device, group = self._stages.device, self._stages.process_group
            stage = _TimedStage(self, index, num_stages, device, input_args=tensors[index], output_args=sent, group=group)
            # 1F1B refuses fewer micro-batches than stages. In that case its order would equal GPipe's.
            kind = get_schedule_class(self._schedule if training and number >= num_stages else "gpipe")
            loss = (lambda output, target: output) if training else None
            self._built[number, size, training] = stage, kind(stage, number, loss_fn=loss, scale_grads=False)
        return self._built[number, size, training]


def _sized(input: Tensor, num_samples: int) -> Tensor:
    return input.new_empty((num_samples, *input.shape[1:])).requires_grad_()


class _TimedStage(PipelineStage):
    """A stage that marks the end of each backward pass, and of the wait before it."""

    mark: Mark

    def backward_one_chunk(self, *arguments: Any, **options: Any) -> None:
        self.mark("bubble")
        super().backward_one_chunk(*arguments, **options)
        self.mark("backward")
