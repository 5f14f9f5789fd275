"""One training step: with a teacher it distils, without one it trains on labels alone. Nothing here waits for the GPU.

Shapes: B batch of this rank, C channels, H W pixels, K classes.
"""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch.distributed as dist
from torch import Tensor

from trainables.device.compilation import Compilation
from trainables.device.device_batches import DeviceBatch
from trainables.distributed.gather import Gather
from trainables.distributed.group import GlobalCount, Group
from trainables.engine.epochs import Epochs
from trainables.engine.loss_optimizers import LossOptimizer
from trainables.engine.losses import Losses, losses
from trainables.engine.step_sums import StepSums
from trainables.engine.updates import ParameterUpdate, UpdateSettings
from trainables.methods.contract import MethodBatch, ModelOutputs
from trainables.methods.distillation_module import DistillationModule, DistillationOutputs
from trainables.metrics.noise_scale import num_parts
from trainables.metrics.phase_timer import PhaseTimer
from trainables.teachers.interface import TeacherInterface, TeacherRequest

TeacherOutputs = Mapping[str, ModelOutputs]
"""Of a micro-batch, by method."""


class TrainingParts(NamedTuple):
    """What the steps of a job train, and how often."""

    module: DistillationModule
    teacher: TeacherInterface
    optimizers: tuple[LossOptimizer, ...]
    settings: UpdateSettings
    epochs: Epochs


class NoTeacher(TeacherInterface):
    """Stands for the teacher where no method reads one."""

    def __call__(self, *_: object, **__: object) -> dict[str, ModelOutputs]:
        return {}


@dataclass(kw_only=True)
class TrainState:
    """What steps need."""

    distillation_module: DistillationModule
    """The bare student with its methods."""
    teacher: TeacherInterface
    optimizers: tuple[LossOptimizer, ...]
    update: ParameterUpdate
    """How a step changes the parameters; its module is `distillation_module`, on several ranks under DDP if that averages."""
    group: Group
    prepare: Callable[[DeviceBatch], DeviceBatch]
    autocast: Callable[[], contextlib.AbstractContextManager[None]]
    compilation: Compilation
    epochs: Epochs
    num_blank_images: int = 2
    """Images that a rank without samples runs instead."""
    accumulate: int = 1
    cpu_group: dist.ProcessGroup | None = None
    """See `trainables.distributed.gather.cpu_process_group`."""
    sums: StepSums
    """Since the last log line."""


def sum_names(module: DistillationModule) -> tuple[str, ...]:
    """What the steps of a module add up over images."""
    distilled = ("distill_loss", *module.term_names) if module.methods else ()
    return ("images", "top1", "top5", "loss", "task_loss", *distilled)


def micro_batches(batch: DeviceBatch, accumulate: int, num_blank_images: int = 2) -> list[DeviceBatch]:
    """A prepared batch in at most `accumulate` parts. Where the rank has no samples, blank images without labels.

    A rank without samples still has to take part in DDP's all-reduce. Where its batch norm refuses to normalise nothing, or a
    single image, it runs two blank ones without labels; its statistics are overwritten by rank 0's, whose part of the batch is
    always the larger one.
    """
    if len(batch.labels_B) == 0:
        blank_BCHW = batch.images_BCHW.new_zeros((num_blank_images, *batch.images_BCHW.shape[1:]))
        return [batch._replace(images_BCHW=blank_BCHW, mix=None)]
    parts = min(accumulate, len(batch.labels_B))
    size, larger = divmod(len(batch.labels_B), parts)
    return batch.split([size + (part < larger) for part in range(parts)])


def train_step(train_state: TrainState, batch: DeviceBatch, step: int, timer: PhaseTimer) -> None:
    """Forward, loss, backward, update; adds to `train_state.sums`."""
    batch.wait()
    timer.mark("h2d")
    prepared = train_state.prepare(batch)
    timer.mark("augment")
    num_images, group, accumulate = len(batch.labels_B), train_state.group, train_state.accumulate
    count = GlobalCount(num_images, group, parts=num_parts(num_images, group, accumulate))
    epoch, update = train_state.epochs.passed(step), train_state.update
    parts = micro_batches(prepared, accumulate, train_state.num_blank_images)
    train_state.compilation.begin_step()
    train_state.teacher.skip(parts[0].images_BCHW, accumulate - len(parts))
    for part in parts:
        timer.begin_micro_batch()
        compiled = train_state.compilation.batch(len(part.images_BCHW), eager=update.requires_eager_forward)
        with compiled, update.micro_batch(last=part is parts[-1]):
            teacher_outputs = run_teacher(train_state, part)
            timer.mark("teacher")
            outputs, loss = run_student(train_state, part.images_BCHW, part, teacher_outputs, epoch)
            train_state.sums.add(step, outputs.logits_BK, part.labels_B, loss.named)
            timer.mark("student")  # before the weight, which waits for ranks that have not begun their step
            update.backward(loss, count.weight(), len(part.labels_B))
        if part is not parts[-1]:
            timer.mark("backward")
    update.average_gradients(count)
    timer.mark("backward")  # with what is left of the average over ranks
    update.step()
    timer.mark("optimizer")


def run_teacher(train_state: TrainState, part: DeviceBatch) -> TeacherOutputs:
    request = TeacherRequest(part.host_indices_B, part.epoch)
    with train_state.autocast():
        return train_state.teacher(part.images_BCHW, len(part.labels_B), request)


def run_student(
    train_state: TrainState,
    inputs: Tensor,
    part: DeviceBatch,
    teacher_outputs: TeacherOutputs,
    epoch: float,
) -> tuple[DistillationOutputs, Losses]:
    """The outputs and the losses of a micro-batch. `inputs`: of the update's module, where it is a part of the student."""
    rows = len(part.labels_B)
    gather = Gather(rows, train_state.group, train_state.cpu_group)
    method_batch = MethodBatch(part.images_BCHW[:rows], part.labels_B, part.indices_B, epoch, gather)
    with train_state.autocast():
        outputs: DistillationOutputs = train_state.update.module(inputs, method_batch, teacher_outputs)
    module = train_state.distillation_module
    module.check_terms(outputs.terms)
    return outputs, losses(outputs, part.labels_B, part.mix, module.weights(epoch))
