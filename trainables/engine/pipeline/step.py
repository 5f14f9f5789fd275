"""The train step of one pipeline stage: forward and backward of the replica's micro-batches, then one update.

Shapes: S samples of a micro-batch, C channels, H W pixels.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from trainables.config import TrainConfig
from trainables.device.device_batches import DeviceBatch
from trainables.device.tensor_format import pixels_of, tensor_format
from trainables.distributed.group import GlobalCount, Group, all_reduce_sum
from trainables.distributed.pipeline.layout import Layout
from trainables.distributed.pipeline.runner import Forward, PipelineRunner
from trainables.engine.job import Logits, TrainStep
from trainables.engine.loss_optimizers import LossOptimizer
from trainables.engine.passes import TrainState, micro_batches, run_student, run_teacher
from trainables.engine.updates import SharedUpdate, UpdateSettings, all_reduce_mean, assign_grads
from trainables.metrics.phase_timer import PhaseTimer
from trainables.models.forward import logits_and_aux
from trainables.rules import pipeline_micro_batches


class PipelineUpdate(SharedUpdate):
    """One optimizer for this rank's pipeline stage, with gradients averaged over replicas without DDP."""

    noise_disabled_reason = "scale.pipeline_stages does not support it"

    def __init__(
        self, module: nn.Module, optimizer: LossOptimizer, settings: UpdateSettings, stages: Group, clip_grad_norm: float | None
    ) -> None:
        """`clip_grad_norm` limits the norm over all stages, and replaces the clipping of `settings`."""
        super().__init__(module, optimizer, settings)
        self._stages = stages
        if clip_grad_norm is not None:
            self._clip = partial(self._clip_norm, max_norm=clip_grad_norm)

    def end_backward(self, count: GlobalCount) -> None:
        """All-reduce once. This overlaps with other stages, since stages finish at different times."""
        parameters = self._optimizer.parameters
        assign_grads(parameters, all_reduce_mean([parameter.grad for parameter in parameters], self._group))

    def _clip_norm(self, parameters: Sequence[nn.Parameter], max_norm: float) -> None:
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        norm = nn.utils.get_total_norm(gradients).to(self._stages.device)  # without gradients the norm is a zero on the CPU
        total = all_reduce_sum(norm.double() ** 2, self._stages).sqrt()
        nn.utils.clip_grads_with_norm_(parameters, max_norm, total.to(norm.dtype))


def pipeline_step(
    train_state: TrainState,
    runner: PipelineRunner,
    num_micro_batches: int,
    batch: DeviceBatch,
    step: int,
    timer: PhaseTimer,
) -> None:
    """Do what `trainables.engine.train.train_step` does, on a rank that has one pipeline stage.

    Phases: `student` is the stage's forward passes, on the last stage with the methods and the losses; `backward` ends with the
    all-reduce over replicas; `bubble` is the time spent waiting for neighboring stages.
    """
    batch.wait()
    timer.mark("h2d")
    count = GlobalCount(len(batch.labels_B), train_state.group, num_samples=batch.num_samples)
    parts = micro_batches(train_state.prepare(batch), train_state.accumulate, train_state.num_dummy_images)
    timer.mark("augment")
    divided = [micro_batches(part, num_micro_batches, train_state.num_dummy_images) for part in parts]
    if runner.is_last:
        max_calls = train_state.accumulate * num_micro_batches
        train_state.teacher.skip(parts[0].images_BCHW, max_calls - sum(map(len, divided)))
    for part, each in zip(parts, divided, strict=True):
        loss = _loss_fn(train_state, each, count, step, timer) if runner.is_last else None
        runner.run(part.images_BCHW, len(each), loss=loss, mark=timer.mark)
    train_state.update.end_backward(count)
    timer.mark("backward")
    train_state.update.step()
    timer.mark("optimizer")


def _loss_fn(train_state: TrainState, parts: Sequence[DeviceBatch], count: GlobalCount, step: int, timer: PhaseTimer) -> Forward:
    """Return the last stage's loss function. The teacher runs on all micro-batches while the first is still in earlier stages."""
    epochs_passed = train_state.epochs.passed(step)
    remaining = iter([(each, run_teacher(train_state, each)) for each in parts])
    timer.mark("teacher")

    def loss_of(received: Tensor) -> Tensor:
        each, teacher_outputs = next(remaining)
        outputs, losses = run_student(train_state, received, each, teacher_outputs, epochs_passed)
        train_state.sums.add(step, outputs.logits_BK, each.labels_B, losses.named)
        return losses.total(count.weight())

    return loss_of


def pipeline_functions(config: TrainConfig, layout: Layout, train_state: TrainState) -> tuple[TrainStep, Logits]:
    """Return the train step and the evaluation forward of a rank with one stage. Every rank must call this."""
    module = train_state.distillation_module
    if not (layout.is_first or layout.is_last):
        train_state.prepare = lambda batch: batch  # a middle stage has no pixels

    def forward(received: Tensor) -> Tensor:
        with train_state.autocast():
            return logits_and_aux(module.student(received))[0]

    size, number, pixels = config.data.image_size, pipeline_micro_batches(config), pixels_of(config)
    images_BCHW = torch.empty(2, 3, size, size, dtype=tensor_format(config)[0], device="meta")
    module.eval()
    runner = PipelineRunner(forward, images_BCHW, layout.pipeline, config.scale.schedule)
    module.train()

    def logits(batch: DeviceBatch) -> Tensor | None:
        images_BCHW = pixels(batch.images_BCHW) if layout.is_first else batch.images_BCHW
        return runner.run(images_BCHW, number, training=False)

    return partial(pipeline_step, train_state, runner, number), logits
