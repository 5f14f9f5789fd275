"""How batches pass through a job's model: its training steps, and the logits of its evaluation."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from torch import Tensor

from trainables.config import TrainConfig
from trainables.device.augment import build_train_inputs
from trainables.device.compilation import Compilation
from trainables.device.device_batches import DeviceBatch
from trainables.device.model_input import autocast, image_normalizer
from trainables.distributed.batch_norm import accepts_empty_batches
from trainables.distributed.gather import cpu_process_group
from trainables.distributed.group import gather_objects
from trainables.distributed.pipeline.layout import Layout
from trainables.engine.evaluate import logits_of
from trainables.engine.step import TrainingParts, TrainState, sum_names, train_step
from trainables.engine.step_sums import StepSums
from trainables.engine.updates import ParameterUpdate, build_update
from trainables.metrics.phase_timer import PhaseTimer

TrainStep = Callable[[DeviceBatch, int, PhaseTimer], None]
"""Trains on a batch in the step of this index, see `trainables.engine.step.train_step`."""


class StepFunctions(NamedTuple):
    """What a job calls for each of its batches."""

    train_state: TrainState
    train_step: TrainStep
    logits: Callable[[DeviceBatch], Tensor | None]
    """The student's for a batch of the evaluation; None where another rank has them."""


def whole_model_functions(config: TrainConfig, layout: Layout, parts: TrainingParts) -> StepFunctions:
    """Of a rank that has the whole model."""
    compares = layout.replicas.world_size > 1 or config.optim.accumulate > 1
    update = build_update(parts.module, parts.optimizers, parts.settings, measures_noise=config.measures_noise and compares)
    train_state = build_train_state(config, layout, parts, update)
    normalize = image_normalizer(config, layout.replicas.device)
    logits = logits_of(parts.module.student, normalize, train_state.autocast, train_state.compilation)
    return StepFunctions(train_state, partial(train_step, train_state), logits)


def build_train_state(config: TrainConfig, layout: Layout, parts: TrainingParts, update: ParameterUpdate) -> TrainState:
    """What the steps of a rank need. Every rank calls it."""
    device, module = layout.replicas.device, parts.module
    return TrainState(
        distillation_module=module,
        teacher=parts.teacher,
        optimizers=parts.optimizers,
        update=update,
        group=layout.replicas,
        prepare=build_train_inputs(config, device),
        autocast=autocast(config.precision, device),
        epochs=parts.epochs,
        num_blank_images=0 if accepts_empty_batches(module.student) else 2,
        accumulate=config.optim.accumulate,
        compilation=Compilation.of(config),
        cpu_group=cpu_process_group(layout.replicas) if module.methods else None,
        sums=StepSums(gather_objects(sum_names(module), layout.pipeline)[-1], device),
    )
