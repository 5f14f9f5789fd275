"""Build a job on one rank: open the data, build and wrap the models, restore the last checkpoint. Knows no Ray."""

import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from trainables.config import TrainConfig
from trainables.data.identity import data_changes, data_identity
from trainables.data.loader.auto_workers import AutoWorkers
from trainables.data.loader.loader import Loader
from trainables.data.loader.loader_process import loader_process
from trainables.data.order import Split
from trainables.data.source import open_on_node
from trainables.device.compilation import compile_model
from trainables.device.decode import check_decoder
from trainables.device.model_input import tensor_format
from trainables.device.precision import with_precision
from trainables.disk_writer import DiskWriter
from trainables.distributed.group import Group, from_rank, gather_objects, seed_rank
from trainables.distributed.pipeline.layout import Layout, build_layout
from trainables.engine import checkpoint
from trainables.engine.checkpoint import CheckpointState, Progress
from trainables.engine.checkpoint_writer import CheckpointWriter
from trainables.engine.epochs import Epochs
from trainables.engine.interruptions import InterruptionRequest, Interruptions
from trainables.engine.job_metrics import JobMetrics, build_metrics
from trainables.engine.loss_optimizers import LossOptimizer, build_optimizers, init_optimizer
from trainables.engine.modules import build_modules, build_student, differentiating_method, selected_methods
from trainables.engine.pipeline.build import cut_student, with_saved_cut
from trainables.engine.pipeline.pipeline_loader import PipelineLoader
from trainables.engine.step import NoTeacher, TrainingParts, TrainState
from trainables.engine.step_functions import StepFunctions, whole_model_functions
from trainables.engine.teacher_placement import is_sharded, place
from trainables.engine.updates import UpdateSettings
from trainables.errors import ExperimentError
from trainables.methods.distillation_module import DistillationModule
from trainables.methods.init_stage import init_epochs
from trainables.metrics.heartbeat import Heartbeat
from trainables.metrics.metrics_file import Report
from trainables.rules import first_problem
from trainables.rundir import StageDir
from trainables.stage_result import TeacherAccuracy
from trainables.teachers.interface import TeacherInterface
from trainables.teachers.network import TeacherNetwork
from trainables.teachers.service.protocol import TeacherConnection

log = logging.getLogger("raydistill")


class Snapshot(Protocol):
    """Telemetry of the nodes since the last call, or (`whole`) since the job began; every rank calls it."""

    def __call__(self, whole: bool = False) -> dict[str, float]: ...


@dataclass(kw_only=True)
class Job:
    """One training job on this rank."""

    config: TrainConfig
    group: Group
    stage: StageDir
    train_loader: Loader
    val_loader: Loader
    functions: StepFunctions
    checkpoint_state: CheckpointState
    metrics: JobMetrics
    report: Report
    disk: DiskWriter
    """Writes checkpoints, and where `report` puts its records there too, each in its order."""
    checkpoints: CheckpointWriter
    telemetry: Snapshot
    interruptions: Interruptions
    stop_early: Callable[[Sequence[float]], bool] | None = None
    """Of a timing run: whether the seconds of its steps past the warm-up are enough to end it. None: it runs all its steps."""
    resources: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    """Ends the threads and processes of loaders, teacher and disk."""
    teachers: list[TeacherAccuracy] = field(default_factory=list)
    """Those with given weights, once `run` has measured them."""
    logged_skips: set[tuple[Loader, int]] = field(default_factory=set)
    """Unreadable images that the log has named: the loader, and the image's index."""

    @property
    def train_state(self) -> TrainState:
        return self.functions.train_state

    @property
    def student(self) -> nn.Module:
        """The bare student, or this rank's pipeline stage of it.

        It is trained through the module of `train_state.update`, which wraps it with its methods.
        """
        return self.train_state.distillation_module.student

    @property
    def epochs(self) -> Epochs:
        return self.train_state.epochs

    @property
    def progress(self) -> Progress:
        return self.checkpoint_state.progress

    def close(self) -> None:
        """End the threads of loaders and disk, and release what they use on this node. The job can train no more."""
        self.resources.close()


def build(
    config: TrainConfig,
    group: Group,
    report: Report,
    telemetry: Snapshot,
    *,
    stop_early: Callable[[Sequence[float]], bool] | None = None,
    connections: Sequence[TeacherConnection] = (),
    disk: DiskWriter | None = None,
    heartbeat: Heartbeat | None = None,
    interruption_request: InterruptionRequest = lambda: None,
    publish: Callable[[Path], None] = lambda path: None,
) -> Job:
    """Open the data, build and wrap the models, and continue from the stage's last checkpoint if there is one.

    `connections`: to the actors of `teacher.service`; `disk`: the one that `report` puts its records into, if any;
    `heartbeat`: says from now on where the job is; `interruption_request`: see `Interruptions`;
    `publish`: see `CheckpointWriter`.

    Raises:
        DataError: the data cannot be read.
        ModelError: a model does not exist, or does not fit images, classes or the device's memory.
        CheckpointError: a file of weights, or the checkpoint, is damaged or of something else.
        ExperimentError: keys or methods do not fit together.
    """
    if problem := first_problem(config):
        raise ExperimentError(problem)
    disk = disk or DiskWriter()
    config = with_precision(config, group, in_float32=differentiating_method(config))
    stage = StageDir(Path(config.output_dir))
    # Rank 0 decides for all: a shared file system may show a file to one node later than to another.
    resumes = gather_objects(stage.last.exists(), group)[0]
    if resumes and config.scale.pipeline_stages != 1:
        config = from_rank(lambda: with_saved_cut(config, stage.last), group)
    layout = build_layout(group, config.scale.pipeline_stages)
    with contextlib.ExitStack() as resources:  # closed here where the job cannot be built
        resources.callback(disk.close)
        classes, (train_loader, val_loader) = open_loaders(config, layout)
        resources.callback(val_loader.close)
        resources.callback(train_loader.close)
        models = build_models(config, layout, classes, train_loader, connections)
        config, module = models.config, models.module
        resources.callback(models.teacher.close)
        if config.init_stage:
            optimizers: tuple[LossOptimizer, ...] = (init_optimizer(module, config.optim),)
        else:
            optimizers = build_optimizers(module.student, module.methods_by_name, config.optim)
        checkpoint_state = build_checkpoint_state(models, optimizers, layout, classes)
        if config.train.max_steps is None:
            checkpoint_state.data = from_rank(lambda: data_identity(train_loader.source, val_loader.source), group)
        seed_rank(config.seed, group.rank)
        if resumes:
            restore(checkpoint_state, config, stage, group, train_loader.steps_per_epoch)
        elif config.init_checkpoint is not None:
            checkpoint.begin_from_init_stage(Path(config.init_checkpoint), checkpoint_state, group)
        settings = UpdateSettings(
            checkpoint_state.scaler, layout.replicas, config.optim.clip_grad_norm, compiled=bool(config.train.compile)
        )
        epochs = Epochs(
            config.optim.epochs,
            train_loader.steps_per_epoch,
            order_offset=init_epochs(selected_methods(config)) if config.init_checkpoint is not None else 0,
            step_offset=checkpoint_state.progress.step_offset,
        )
        parts = TrainingParts(module, models.teacher, optimizers, settings, epochs)
        functions = functions_of(layout)(config, layout, parts)
        return Job(
            config=config,
            group=group,
            stage=stage,
            train_loader=train_loader,
            val_loader=val_loader,
            functions=functions,
            checkpoint_state=checkpoint_state,
            metrics=build_metrics(config, functions, checkpoint_state.progress, heartbeat or Heartbeat()),
            report=report,
            disk=disk,
            checkpoints=CheckpointWriter(disk, group.device, publish),
            telemetry=telemetry,
            interruptions=Interruptions(group, config.train.checkpoint_every_s, interruption_request),
            stop_early=stop_early,
            resources=resources.pop_all(),
        )


def functions_of(layout: Layout) -> Callable[[TrainConfig, Layout, TrainingParts], StepFunctions]:
    """Builds the step of a whole model, or of a pipeline stage."""
    if layout.pipeline.world_size == 1:
        return whole_model_functions
    from trainables.engine.pipeline.step import pipeline_functions  # torch's pipelining takes a second and 150 MB

    return pipeline_functions


class Models(NamedTuple):
    """What a rank has of a job's models."""

    config: TrainConfig
    """The job's, with the cut into pipeline stages that it leaves open."""
    name: str
    """The student's in full."""
    module: DistillationModule
    """The student, or a pipeline stage of it, and its methods, which the last stage has."""
    teacher: TeacherInterface


def build_models(
    config: TrainConfig, layout: Layout, classes: tuple[str, ...], loader: Loader, connections: Sequence[TeacherConnection]
) -> Models:
    in_pipeline, device = layout.pipeline.world_size > 1, layout.replicas.device
    name, student = build_student(config, Group() if in_pipeline else layout.replicas, len(classes))
    module = DistillationModule(student)
    teacher: TeacherInterface = NoTeacher()
    if layout.is_last:
        module, found = build_modules(config, layout.replicas, student, classes, loader, connections)
        teacher = found or teacher
    network = teacher.model if isinstance(teacher, TeacherNetwork) else None
    sharded = network is not None and any(
        gather_objects(is_sharded(config, layout.replicas.world_size, device, student, network), layout.replicas)
    )
    if in_pipeline:
        config = cut_student(config, layout, module, network, teacher_is_sharded=sharded)
    if isinstance(teacher, TeacherNetwork):
        place(teacher, config, layout.replicas, sharded=sharded)
    dtype, memory_format = tensor_format(config)
    module.methods.to(device, dtype)
    for parameter in module.methods.parameters():
        if parameter.dim() == 4:  # its gradient comes in the images' format, and DDP copies one of another format than its own
            parameter.data = parameter.data.to(dtype, memory_format=memory_format)
    compile_model(student, config.train.compile)
    return Models(config, name, module, teacher)


def build_checkpoint_state(
    models: Models, optimizers: Sequence[LossOptimizer], layout: Layout, classes: Sequence[str]
) -> CheckpointState:
    """What a checkpoint of the job holds, before the first step."""
    config, module = models.config, models.module
    return CheckpointState(
        student=module.student,
        methods=module.methods,
        optimizers=[each.optimizer for each in optimizers],
        scaler=torch.amp.GradScaler(layout.replicas.device.type, enabled=config.precision == "fp16"),
        progress=Progress(),
        about=checkpoint_about(config, models.name, classes),
        stages=layout.writers,
    )


def restore(state: CheckpointState, config: TrainConfig, stage: StageDir, group: Group, steps_per_epoch: int) -> None:
    """Continue from the stage's last checkpoint, whose unfinished epoch begins again where it was trained on other data.

    Raises DataError where that is not accepted, CheckpointError: see `checkpoint.restore`.
    """
    before = checkpoint.restore(stage.last, state, group, config.accepted_data)
    if before is None or state.data is None or state.progress.epoch >= config.optim.epochs:
        return
    state.progress.begin_epoch_on_other_data(steps_per_epoch, forget_best=before.val != state.data.val)
    if group.is_main:
        changes = ", ".join(data_changes(before, state.data))
        log.warning("%s: other data from epoch %d on: %s", config.stage, state.progress.epoch + 1, changes)


def checkpoint_about(config: TrainConfig, name: str, classes: Sequence[str]) -> dict[str, Any]:
    about = {"stage": config.stage, "model": name, "num_classes": len(classes), "classes": list(classes), "seed": config.seed}
    about |= config.data.model_dump(mode="json", include={"image_size", "val_resize", "mean", "std"})
    about["pipeline"] = config.scale.model_dump(mode="json", include={"pipeline_stages", "cut"})
    return about


def open_loaders(config: TrainConfig, layout: Layout) -> tuple[tuple[str, ...], tuple[Loader, Loader]]:
    """The class names, and this rank's loaders of the training and the validation split."""
    data, device = config.data, layout.replicas.device
    kind = partial(PipelineLoader, hosts=layout.hosts) if layout.pipeline.world_size > 1 else Loader
    if not isinstance(data.loader_workers, int):
        raise ExperimentError("data.loader_workers is `auto`: the driver resolves it before a job is built")
    check_decoder(data, device, max(1, data.loader_workers))
    sources = {"train": open_on_node(data, "train"), "val": open_on_node(data, "val")}
    process = loader_process(data, world_size=layout.replicas.world_size, device=device)

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
            process=process,
            auto=AutoWorkers(data.loader_workers) if config.loader_auto and training else None,
            num_augmentation_epochs=config.num_augmentation_epochs if training else None,
        )

    return sources["train"].classes, (loader("train"), loader("val"))
