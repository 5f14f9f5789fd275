"""How batches pass through a job's model: its training steps, and the logits of its evaluation."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from torch import Tensor

from trainables.config import TrainConfig
from trainables.device.augment import build_train_inputs
from trainables.device.device_batches import DeviceBatch
from trainables.device.model_input import autocast, image_normalizer
from trainables.distributed.batch_norm import accepts_empty_batches
from trainables.distributed.gather import cpu_process_group
from trainables.distributed.group import gather_objects
from trainables.distributed.pipeline.layout import Layout
from trainables.engine.cuda_capture import CudaCapture
from trainables.engine.evaluate import logits_of
from trainables.engine.graph_obstacle import log_eager, obstacle
from trainables.engine.graphed_step import GraphedStep, TrainStep
from trainables.engine.launch_bound import is_launch_bound
from trainables.engine.step import TrainingParts, TrainState, sum_names, train_step
from trainables.engine.step_sums import StepSums
from trainables.engine.updates import ParameterUpdate, build_update


class StepFunctions(NamedTuple):
    """What a job calls for each of its batches."""

    train_state: TrainState
    train_step: TrainStep
    logits: Callable[[DeviceBatch], Tensor | None]
    """The student's for a batch of the evaluation; None where another rank has them."""
    graphs: GraphedStep | None = None
    """The train step, where it is launched as CUDA graphs."""


def whole_model_functions(config: TrainConfig, layout: Layout, parts: TrainingParts) -> StepFunctions:
    """Of a rank that has the whole model."""
    group, graphed = layout.replicas, config.train.cuda_graphs
    if graphed and (reason := obstacle(config, group, parts)):
        graphed = False
        if group.is_main:
            log_eager(config.stage, reason)
    update_of = partial(build_update, parts.module, parts.optimizers, parts.settings, accumulate=config.optim.accumulate)
    train_state = build_train_state(config, layout, parts, update_of(capturable=bool(graphed)))
    if graphed == "auto":
        num_images = max(1, config.data.global_batch_size // group.world_size)
        graphed = is_launch_bound(train_state, config.stage, image_size=config.data.image_size, num_images=num_images)
        if not graphed:
            train_state = replace(train_state, training_update=update_of(capturable=False))
    logits = logits_of(parts.module.student, image_normalizer(config, group.device), train_state.autocast)
    if not graphed:
        return StepFunctions(train_state, partial(train_step, train_state), logits)
    step = GraphedStep(train_state, CudaCapture(group.device), config.stage)
    return StepFunctions(train_state, step, logits, graphs=step)


def build_train_state(config: TrainConfig, layout: Layout, parts: TrainingParts, update: ParameterUpdate) -> TrainState:
    """What the steps of a rank need. Every rank calls it."""
    device, module = layout.replicas.device, parts.module
    return TrainState(
        distillation_module=module,
        teacher=parts.teacher,
        optimizers=parts.optimizers,
        training_update=update,
        update_settings=parts.settings,
        group=layout.replicas,
        prepare=build_train_inputs(config, device),
        autocast=autocast(config.precision, device),
        epochs=parts.epochs,
        num_blank_images=0 if accepts_empty_batches(module.student) else 2,
        accumulate=config.optim.accumulate,
        cpu_group=cpu_process_group(layout.replicas) if module.methods else None,
        sums=StepSums(gather_objects(sum_names(module), layout.pipeline)[-1], device),
    )
