"""Build the parts of a job: loaders, models, optimizers, checkpoint state. Knows no Ray."""

import logging
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple

import torch

from trainables.config import TrainConfig
from trainables.data.identity import data_changes, data_identity
from trainables.data.loader.loader import Loader
from trainables.data.order import Split
from trainables.data.source import open_on_node
from trainables.device.compilation import compile_model
from trainables.device.decode import check_decoder
from trainables.device.tensor_format import tensor_format
from trainables.distributed.group import Group, broadcast_result, gather_objects
from trainables.distributed.pipeline.layout import Layout
from trainables.engine import checkpoint
from trainables.engine.checkpoint import CheckpointState, Progress
from trainables.engine.loss_optimizers import LossOptimizer
from trainables.engine.modules import build_modules, build_student, methods_with_teacher
from trainables.engine.passes import NoTeacher
from trainables.engine.pipeline.build import cut_student
from trainables.engine.pipeline.pipeline_loader import PipelineLoader
from trainables.engine.teacher_placement import is_sharded, place
from trainables.engine.weight_average import WeightAverage
from trainables.errors import ExperimentError
from trainables.methods.distillation_module import DistillationModule
from trainables.methods.tap_reader import TapReader
from trainables.models.model_input import teacher_input, trained_model_input
from trainables.models.pixels import take_pixels
from trainables.models.tap_names import classifier
from trainables.models.weights import begin_with
from trainables.rundir import StageDir
from trainables.teachers.interface import TeacherInterface
from trainables.teachers.network import TeacherNetwork
from trainables.teachers.service.protocol import TeacherConnection

log = logging.getLogger("raydistill")


def open_loaders(config: TrainConfig, layout: Layout) -> tuple[tuple[str, ...], tuple[Loader, Loader]]:
    """Return the class names, and this rank's training and validation loaders."""
    data, device = config.data, layout.replicas.device
    kind = partial(PipelineLoader, cpu_group=layout.cpu_group) if layout.pipeline.world_size > 1 else Loader
    if not isinstance(data.loader_workers, int):
        raise ExperimentError("data.loader_workers is `auto`: the driver resolves it before a job is built")
    check_decoder(data, device, max(1, data.loader_workers))
    sources = {"train": open_on_node(data, "train"), "val": open_on_node(data, "val")}

    def loader(split: Split) -> Loader:
        assert isinstance(data.loader_workers, int)
        training = split == "train"
        return kind(
            sources[split],
            data,
            split=split,
            seed=config.seed,
            rank=layout.replicas.rank,
            world_size=layout.replicas.world_size,
            loader_workers=data.loader_workers,
            device=device,
            num_augmentation_epochs=config.num_augmentation_epochs if training else None,
        )

    return sources["train"].classes, (loader("train"), loader("val"))


class Models(NamedTuple):
    """This rank's part of a job's models."""

    config: TrainConfig
    """The job's configuration, now with the cut into pipeline stages."""
    name: str
    """The student's full name."""
    module: DistillationModule
    """The student or this rank's pipeline stage of it, and the methods, which are on the last stage."""
    teacher: TeacherInterface
    embedding: TapReader | None
    """Reads the student's embedding; None for a student with a classifier."""


def build_models(
    config: TrainConfig, layout: Layout, classes: tuple[str, ...], loader: Loader, connections: Sequence[TeacherConnection]
) -> Models:
    """Build the student with its methods, on the device, and the teacher. Every rank must call this."""
    in_pipeline, device, model_input = layout.pipeline.world_size > 1, layout.replicas.device, trained_model_input(config)
    name, student = build_student(config, Group() if in_pipeline else layout.replicas, len(classes))
    if config.weights is not None:
        fit: dict[str, Any] = {"image_size": model_input.image_size, "classes": classes, "seed": config.seed}
        begin_with(student, config.model, config.weights, **fit, weights_key=config.weights_key)
    if config.freeze:
        student.requires_grad_(False)
        classifier(student).requires_grad_(True)
    module = DistillationModule(student)
    teacher: TeacherInterface = NoTeacher()
    if layout.is_last:
        module, found = build_modules(config, layout.replicas, student, classes, loader, connections)
        teacher = found or teacher
    networks = teacher.networks if isinstance(teacher, TeacherNetwork) else []
    sharded = bool(networks) and any(
        gather_objects(is_sharded(config, layout.replicas.world_size, device, student, networks), layout.replicas)
    )
    if in_pipeline:
        config = cut_student(config, layout, module, networks, teacher_is_sharded=sharded)
    if layout.is_first:
        take_pixels(student, model_input)
        student.to(tensor_format(config)[0])
    if layout.job.is_main:
        log.info("%s: student %s sees %s", config.stage, name, model_input)
        if methods_with_teacher(config):
            for each in config.all_teachers:
                log.info("%s: teacher %s sees %s", config.stage, each.model, teacher_input(each, config.data))
    if isinstance(teacher, TeacherNetwork):
        place(teacher, config, layout.replicas, sharded=sharded)
    embedding = None
    if not module.classifies:
        taps = {"embedding": ("embedding",)}
        embedding = TapReader(student, taps, name=name, image_size=config.data.image_size, without_logits=taps)
    dtype, memory_format = tensor_format(config)
    module.methods.to(device, dtype)
    for parameter in module.methods.parameters():
        if parameter.dim() == 4:  # match the gradient's memory format: otherwise DDP copies it
            parameter.data = parameter.data.to(dtype, memory_format=memory_format)
    compile_model(student, config.train.compile)
    return Models(config, name, module, teacher, embedding)


def build_checkpoint_state(
    models: Models, optimizers: Sequence[LossOptimizer], layout: Layout, classes: Sequence[str], loaders: tuple[Loader, Loader]
) -> CheckpointState:
    """Build the state that checkpoints store, before the first step. Every rank must call this."""
    config, module, data = models.config, models.module, None
    if config.train.max_steps is None:
        data = broadcast_result(lambda: data_identity(*(loader.source for loader in loaders)), layout.job)
    return CheckpointState(
        student=module.student,
        methods=module.methods,
        optimizers=[each.optimizer for each in optimizers],
        scaler=torch.amp.GradScaler(layout.replicas.device.type, enabled=config.precision == "fp16"),
        progress=Progress(),
        metadata=describe_model(config, models.name, classes),
        data=data,
        average=None if (decay := config.optim.ema_decay) is None else WeightAverage(module.student, module.methods, decay),
        pipeline_stages=layout.writers,
    )


def restore(state: CheckpointState, config: TrainConfig, stage: StageDir, group: Group, steps_per_epoch: int) -> None:
    """Resume from the stage's last checkpoint. If the data has changed since, restart the unfinished epoch.

    Raises DataError if that is not accepted, CheckpointError: see `checkpoint.restore`.
    """
    before = checkpoint.restore(stage.last, state, group, config.accepted_data)
    if before is None or state.data is None or state.progress.epoch >= config.optim.epochs:
        return
    state.progress.restart_epoch_on_other_data(steps_per_epoch, forget_best=before.val != state.data.val)
    if group.is_main:
        changes = ", ".join(data_changes(before, state.data))
        log.warning("%s: the data has changed from epoch %d on: %s", config.stage, state.progress.epoch + 1, changes)


def describe_model(config: TrainConfig, name: str, classes: Sequence[str]) -> dict[str, Any]:
    metadata = {"stage": config.stage, "model": name, "num_classes": len(classes), "classes": list(classes), "seed": config.seed}
    model_input = trained_model_input(config)
    metadata |= asdict(model_input)
    if model_input.image_size == config.data.image_size:  # otherwise the model resizes the crops
        metadata["val_resize"] = config.data.val_resize
    metadata["pipeline"] = config.scale.model_dump(mode="json", include={"pipeline_stages", "cut"})
    return metadata
