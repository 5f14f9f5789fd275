"""The state that train steps share, and the forward passes of one micro-batch: teacher, student, losses.

Shapes: B this rank's batch, C channels, H W pixels, K classes.
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
from trainables.engine.loss_optimizers import LossOptimizer
from trainables.engine.losses import Losses, TaskLoss, compute_losses
from trainables.engine.step_sums import LABELED, StepSums
from trainables.engine.updates import ParameterUpdate
from trainables.engine.weight_average import WeightAverage
from trainables.methods.contract import MethodBatch, ModelOutputs
from trainables.methods.distillation_module import DistillationModule, DistillationOutputs
from trainables.teachers.interface import TeacherInterface, TeacherRequest

TeacherOutputs = Mapping[str, ModelOutputs]
"""Teacher outputs for a micro-batch, by method."""


class NoTeacher(TeacherInterface):
    """Placeholder for when no method reads a teacher."""

    def __call__(self, *_: object, **__: object) -> dict[str, ModelOutputs]:
        return {}


@dataclass(frozen=True)
class Epochs:
    """The epochs of a stage."""

    num: int
    steps_per_epoch: int
    order_offset: int = 0
    """Epochs of a preceding init stage. Data order and augmentation continue from there."""
    step_offset: int = 0
    """Steps so far minus the steps that those epochs would have with the current data: 0 unless the data has changed."""

    def passed(self, step: int) -> float:
        """Return the (fractional) number of epochs before a step of the stage."""
        return (step - self.step_offset) / self.steps_per_epoch


@dataclass(kw_only=True)
class TrainState:
    """Everything that a job's steps use and change."""

    distillation_module: DistillationModule
    """The bare student and its methods."""
    teacher: TeacherInterface
    optimizers: tuple[LossOptimizer, ...]
    update: ParameterUpdate
    """Changes the parameters. Its module is `distillation_module`, wrapped in DDP if DDP averages gradients over ranks."""
    group: Group
    prepare: Callable[[DeviceBatch], DeviceBatch]
    autocast: Callable[[], contextlib.AbstractContextManager[None]]
    compilation: Compilation
    epochs: Epochs
    num_dummy_images: int
    """How many dummy images a rank runs when it has no samples."""
    accumulate: int
    cpu_group: dist.ProcessGroup | None
    """See `trainables.distributed.gather.cpu_process_group`."""
    mixes_unlabeled: bool
    """Whether labeled and unlabeled images are mixed."""
    sums: StepSums
    """Sums since the last log line."""
    average: WeightAverage | None
    """EMA of the student and the methods, see `optim.ema_decay`."""
    task_loss: TaskLoss


def sum_names(module: DistillationModule, *, mixes_unlabeled: bool = False) -> tuple[str, ...]:
    """Return the names of the sums over images that the steps of `module` collect."""
    labels = ("top1", "top5", "loss", "task_loss") if module.classifies else ("loss",)
    distilled = ("distill_loss", *module.term_names) if module.methods else ()
    return ("images", *([LABELED] if mixes_unlabeled else []), *labels, *distilled)


def micro_batches(batch: DeviceBatch, accumulate: int, num_dummy_images: int = 2) -> list[DeviceBatch]:
    """Split a prepared batch into at most `accumulate` parts.

    A rank without samples still has to take part in DDP's all-reduce, so it runs `num_dummy_images` blank images without
    labels: none if its batch norm accepts an empty batch, else two, since it may not accept one image either. Its batch
    statistics do not matter: rank 0's overwrite them, and rank 0 has images unless none could be read.
    """
    if len(batch.labels_B) == 0:
        dummy_BCHW = batch.images_BCHW.new_zeros((num_dummy_images, *batch.images_BCHW.shape[1:]))
        return [batch._replace(images_BCHW=dummy_BCHW, mix=None)]
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
    """Return the outputs and the losses of a micro-batch. `inputs` go to the update's module, which in a pipeline takes the
    output of earlier stages. Outside of training steps, `module` replaces it, and no teacher is dropped.
    """
    rows = len(part.labels_B)
    gather = Gather(rows, train_state.group, train_state.cpu_group)
    method_batch = MethodBatch(part.images_BCHW[:rows], part.labels_B, part.views_B, epochs_passed, gather)
    with train_state.autocast():
        outputs: DistillationOutputs = (module or train_state.update.module)(inputs, method_batch, teacher_outputs)
    bare = train_state.distillation_module
    bare.check_terms(outputs.terms)
    labels_B = part.labels_B if bare.classifies else None
    weights: dict[str, float | Tensor] = {**(fixed := bare.weights(epochs_passed))}
    if bare.dropping is not None and module is None:
        weights |= bare.dropping.weights(outputs.terms, fixed, part.epoch, part.views_B, gather)
    return outputs, compute_losses(outputs, labels_B, part.mix, weights, train_state.task_loss)
