"""Runs one rank's stage of a pipeline: micro-batches forward and backward by a schedule of `torch.distributed.pipelining`.

Shapes: B samples of a replica's batch, S samples of a micro-batch, C channels, H W pixels, K classes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import PipelineScheduleSingle

from trainables.distributed.group import Group, gather_objects

SCHEDULES: dict[str, type[PipelineScheduleSingle]] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}

Forward = Callable[[Tensor], Tensor]
"""From what a stage receives of a micro-batch (S, …) to what it sends on; of the last stage to what comes out of the pipeline."""


@dataclass(frozen=True)
class Boundary:
    """What a stage receives, for one sample."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    has_gradient: bool = True
    """The images have none."""

    def of_samples(self, num_samples: int) -> Tensor:
        """A micro-batch's tensor without memory."""
        return torch.empty((num_samples, *self.shape), dtype=self.dtype, device="meta", requires_grad=self.has_gradient)


def pipeline_stage_inputs(forward: Forward, images: Boundary, stages: Group) -> tuple[Boundary, ...]:
    """What each stage receives, found by a pass of two blank samples on one rank after the other; every rank calls it."""
    inputs = [images]
    for index in range(stages.world_size - 1):
        boundary = None
        if index == stages.rank:
            with torch.no_grad():
                sent = forward(torch.zeros((2, *inputs[-1].shape), dtype=inputs[-1].dtype, device=stages.device))
            boundary = Boundary(tuple(sent.shape[1:]), sent.dtype)
        inputs.append(gather_objects(boundary, stages)[index])
    return tuple(inputs)


def micro_batch_sizes(num_samples: int, num_micro_batches: int) -> list[int]:
    """The samples of each micro-batch: they differ by one at most, the larger ones come first. None is empty."""
    return [len(part) for part in torch.arange(num_samples).tensor_split(min(num_samples, num_micro_batches))]


class PipelineRunner:
    """One rank's stage, and the schedules that have run it."""

    def __init__(self, stages: Group, inputs: tuple[Boundary, ...], schedule: str) -> None:
        """`inputs`: what each stage receives; `schedule`: of training."""
        self._stages, self._inputs = stages, inputs
        self._schedule = SCHEDULES[schedule]
        self._built: dict[tuple[int, int, bool], tuple[_MarkedStage, PipelineScheduleSingle]] = {}
        self._stage_forward = _PipelineStageForward()
        self.is_first, self.is_last = stages.rank == 0, stages.rank == stages.world_size - 1

    def train(
        self, images_BCHW: Tensor, num_micro_batches: int, forward: Forward, mark: Callable[[str], None] = lambda phase: None
    ) -> None:
        """Forward and backward of a batch; gradients are added to the parameters'.

        Only the number of images counts on other stages than the first. On the last one `forward` gives the loss (a scalar) of
        each micro-batch, in their order. `mark` is called at the end of what the rank does: `student` for a forward pass,
        `backward`, and `bubble` for waiting in between.
        """
        sizes = micro_batch_sizes(len(images_BCHW), num_micro_batches)
        stage, schedule = self._schedule_for(len(sizes), sizes[0], training=True)
        stage.mark = mark
        # A target for each micro-batch, or torch does not ask for its loss, which is the last stage's output already.
        target = torch.arange(len(sizes)) if self.is_last else None
        with self._stage_forward.running(forward, sizes):
            schedule.step(*self._arguments(images_BCHW, sizes), target=target, return_outputs=False)
        mark("bubble")

    @torch.no_grad()
    def infer(self, images_BCHW: Tensor, num_micro_batches: int, forward: Forward) -> Tensor | None:
        """The output of the last stage for a batch, there; None on the others. No gradients."""
        sizes = micro_batch_sizes(len(images_BCHW), num_micro_batches)
        stage, schedule = self._schedule_for(len(sizes), sizes[0], training=False)
        with self._stage_forward.running(forward, sizes):
            output = schedule.step(*self._arguments(images_BCHW, sizes))
        stage.clear_runtime_states()  # what it received would stay in memory until the next evaluation
        if not self.is_last:
            return None
        return torch.cat([part[:size] for part, size in zip(output.split(sizes[0]), sizes, strict=True)])

    def _arguments(self, images_BCHW: Tensor, sizes: list[int]) -> tuple[Tensor, ...]:
        """The arguments of the schedule, which divides a batch into equal parts."""
        if not self.is_first:
            return ()
        if sizes[0] == sizes[-1]:
            return (images_BCHW,)
        return (torch.cat([_padded(part, sizes[0]) for part in images_BCHW.split(sizes)]),)

    def _schedule_for(self, number: int, size: int, training: bool) -> tuple[_MarkedStage, PipelineScheduleSingle]:
        if (number, size, training) not in self._built:
            index, num_stages = self._stages.rank, self._stages.world_size
            sent = Boundary((), torch.float64) if self.is_last else self._inputs[index + 1]
            stage = _MarkedStage(
                self._stage_forward,
                index,
                num_stages,
                self._stages.device,
                input_args=self._inputs[index].of_samples(size),
                output_args=sent.of_samples(size),
                group=self._stages.process_group,
            )
            # 1F1B refuses fewer micro-batches than stages; it would run them in GPipe's order.
            schedule = self._schedule if training and number >= num_stages else ScheduleGPipe
            loss = (lambda output, target: output) if training else None
            self._built[number, size, training] = stage, schedule(stage, number, loss_fn=loss, scale_grads=False)
        return self._built[number, size, training]


def _padded(tensor: Tensor, num_rows: int) -> Tensor:
    """With rows of zeros at its end."""
    return F.pad(tensor, (0, 0) * (tensor.ndim - 1) + (0, num_rows - len(tensor)))


class _PipelineStageForward(nn.Module):
    """What torch takes for a stage's module: calls the `Forward` of the current run.

    Torch's schedules send tensors of one shape. A smaller micro-batch has a row more on its way, which no module gets: batch norm
    sees samples only.
    """

    def __init__(self) -> None:
        super().__init__()
        self._forward: Forward | None = None
        self._largest = 0
        self._sizes: Iterator[int] = iter(())

    def forward(self, received: Tensor) -> Tensor:
        assert self._forward is not None
        sent = self._forward(received[: next(self._sizes)])
        if sent.ndim:  # no loss
            sent = _padded(sent, self._largest)
        return sent.contiguous()  # a permuted or channels_last tensor cannot be sent

    @contextlib.contextmanager
    def running(self, forward: Forward, sizes: Sequence[int]) -> Iterator[None]:
        """A context in which `forward` runs for micro-batches of these sizes; its exceptions leave the schedule as they are."""
        self._forward, self._largest, self._sizes = forward, sizes[0], iter(sizes)
        try:
            yield
        except RuntimeError as error:
            if error.__cause__ is None:
                raise
            raise error.__cause__ from None  # torch wraps it, with the tensors it was called with
        finally:
            self._forward = None


class _MarkedStage(PipelineStage):
    """Tells when its waiting ends, and each of its passes."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.mark: Callable[[str], None] = lambda phase: None

    def forward_one_chunk(self, *arguments: Any, **options: Any) -> Any:
        self.mark("bubble")
        output = super().forward_one_chunk(*arguments, **options)
        self.mark("student")
        return output

    def backward_one_chunk(self, *arguments: Any, **options: Any) -> None:
        self.mark("bubble")
        super().backward_one_chunk(*arguments, **options)
        self.mark("backward")
