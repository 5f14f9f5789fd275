"""What the steps of a job need, and the forward passes of a micro-batch: the teacher's, the student's, the losses.

Shapes: B batch of this rank, C channels, H W pixels, K classes.
"""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor, nn

from trainables.device.compilation import Compilation
from trainables.device.device_batches import DeviceBatch
from trainables.distributed.gather import Gather
from trainables.distributed.group import Group
from trainables.engine.epochs import Epochs
from trainables.engine.loss_optimizers import LossOptimizer
from trainables.engine.losses import Losses, TaskLoss, compute_losses
from trainables.engine.step_sums import LABELED, StepSums
from trainables.engine.updates import ParameterUpdate
from trainables.engine.weight_average import WeightAverage
from trainables.methods.contract import MethodBatch, ModelOutputs
from trainables.methods.distillation_module import DistillationModule, DistillationOutputs
from trainables.teachers.interface import TeacherInterface, TeacherRequest

TeacherOutputs = Mapping[str, ModelOutputs]
"""The outputs of a micro-batch, by method."""


class NoTeacher(TeacherInterface):
    """Stands for the teacher where no method reads one."""

    def __call__(self, *_: object, **__: object) -> dict[str, ModelOutputs]:
        return {}


@dataclass(kw_only=True)
class TrainState:
    """What the steps of a job need, and change."""

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
    num_blank_images: int
    """Images that a rank without samples runs instead."""
    accumulate: int
    cpu_group: dist.ProcessGroup | None
    """See `trainables.distributed.gather.cpu_process_group`."""
    mixes_unlabeled: bool
    """Whether some images may have no label among others that have one."""
    sums: StepSums
    """Since the last log line."""
    average: WeightAverage | None
    """Averages of the student and the methods, see `optim.ema_decay`."""
    task_loss: TaskLoss


def sum_names(module: DistillationModule, *, mixes_unlabeled: bool = False) -> tuple[str, ...]:
    """What the steps of a module add up over images."""
    labels = ("top1", "top5", "loss", "task_loss") if module.classifies else ("loss",)
    distilled = ("distill_loss", *module.term_names) if module.methods else ()
    return ("images", *([LABELED] if mixes_unlabeled else []), *labels, *distilled)


def micro_batches(batch: DeviceBatch, accumulate: int, num_blank_images: int = 2) -> list[DeviceBatch]:
    """A prepared batch in at most `accumulate` parts. Where the rank has no samples, blank images without labels.

    A rank without samples still has to take part in DDP's all-reduce. Where its batch norm refuses to normalize nothing, or a
    single image, it runs two blank ones without labels; its statistics are overwritten by rank 0's, whose part of the batch is
    the larger one, unless none of its images could be read.
    """
    if len(batch.labels_B) == 0:
        blank_BCHW = batch.images_BCHW.new_zeros((num_blank_images, *batch.images_BCHW.shape[1:]))
        return [batch._replace(images_BCHW=blank_BCHW, mix=None)]
    parts = min(accumulate, len(batch.labels_B))
    size, larger = divmod(len(batch.labels_B), parts)
    return batch.split([size + (part < larger) for part in range(parts)])


def run_teacher(train_state: TrainState, part: DeviceBatch) -> TeacherOutputs:
    request = TeacherRequest(part.host_indices_B, part.epoch, part.mix and part.mix.partners_B)
    with train_state.autocast():
        return train_state.teacher(part.images_BCHW, len(part.labels_B), request)


def run_student(
    train_state: TrainState,
    inputs: Tensor,
    part: DeviceBatch,
    teacher_outputs: TeacherOutputs,
    epochs_passed: float,
    *,
    module: nn.Module | None = None,
) -> tuple[DistillationOutputs, Losses]:
    """The outputs and the losses of a micro-batch. `inputs`: of the update's module, where it is a part of the student; `module`:
    in place of that one, outside of a step: no teacher is dropped.
    """
    rows = len(part.labels_B)
    gather = Gather(rows, train_state.group, train_state.cpu_group)
    method_batch = MethodBatch(part.images_BCHW[:rows], part.labels_B, part.views_B, epochs_passed, gather)
    with train_state.autocast():
        outputs: DistillationOutputs = (module or train_state.update.module)(inputs, method_batch, teacher_outputs)
    bare = train_state.distillation_module
    bare.check_terms(outputs.terms)
    labels_B = part.labels_B if bare.classifies else None
    weights: dict[str, float | Tensor] = {**(plain := bare.weights(epochs_passed))}
    if bare.dropping is not None and module is None:
        weights |= bare.dropping.weights(outputs.terms, plain, part.epoch, part.views_B, gather)
    return outputs, compute_losses(outputs, labels_B, part.mix, weights, train_state.task_loss)
