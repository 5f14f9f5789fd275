"""Build a job on one rank: open the data, build and wrap the models, restore the last checkpoint. Knows no Ray."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainables.config import TrainConfig
from trainables.data.auto_workers import AutoWorkers
from trainables.data.loader import Loader
from trainables.data.order import Split
from trainables.data.source import open_on_node
from trainables.device.augment import TrainInputs
from trainables.device.decode import check_decoder
from trainables.device.model_input import autocast, normalizer, tensor_format
from trainables.distributed.batch_norm import accepts_empty_batches, convert
from trainables.distributed.gather import cpu_process_group
from trainables.distributed.group import Group, gather_objects, seed_rank
from trainables.engine import checkpoint
from trainables.engine.checkpoint import CheckpointState, Progress
from trainables.engine.epochs import Epochs
from trainables.engine.modules import build_modules, selected_methods
from trainables.engine.optimizers import LossOptimizer, build_optimizers
from trainables.engine.step import TrainState
from trainables.engine.updates import MeasuredUpdate, ParameterUpdate, PerLossUpdate, SharedUpdate, UpdateSettings
from trainables.errors import ExperimentError
from trainables.methods.distillation_module import DistillationModule
from trainables.methods.select import student_name
from trainables.metrics.allreduce_wait import AllreduceWait
from trainables.metrics.host_use import HostUse
from trainables.metrics.noise_scale import GradientNoise, NoiseHistory, measure_noise
from trainables.metrics.peak_memory import PeakMemory
from trainables.metrics.phase_timer import PhaseTimer
from trainables.metrics.throughput import Throughput
from trainables.metrics.wall_clock import WallClock
from trainables.models.registry import build_model
from trainables.rules import first_problem
from trainables.rundir import StageDir
from trainables.teachers.service.protocol import TeacherConnection

SIGNATURE = inspect.signature(DistributedDataParallel)
"""torch 2.14 renamed an option."""


class Report(Protocol):
    """Records numbers. `kind`: `start`, `step` (a log line), `epoch` (every rank calls it), `summary`; see `metrics_file`."""

    def __call__(self, kind: str, step: int, epoch: float, metrics: dict[str, float]) -> None: ...


class Snapshot(Protocol):
    """Telemetry of the nodes since the last call, or (`whole`) since the job began; every rank calls it."""

    def __call__(self, whole: bool = False) -> dict[str, float]: ...


@dataclass(kw_only=True)
class JobMetrics:
    """What is measured of a job on this rank."""

    timer: PhaseTimer
    host: HostUse
    throughput: Throughput
    clock: WallClock
    noise: NoiseHistory
    allreduce_wait: AllreduceWait
    peak_memory: PeakMemory

    def start_step(self) -> None:
        """A step begins: it first waits for its batch."""
        self.timer.start()
        self.host.start()

    def stop_step(self) -> None:
        """A step ends."""
        self.timer.stop()
        self.host.stop()
        self.allreduce_wait.end_step()


@dataclass(kw_only=True)
class Job:
    """One training job on this rank."""

    config: TrainConfig
    group: Group
    stage: StageDir
    train_loader: Loader
    val_loader: Loader
    train_state: TrainState
    normalize: Callable[[Tensor], Tensor]
    """From uint8 images_BCHW on the device to the models' input, for evaluation; training augments too."""
    checkpoint_state: CheckpointState
    metrics: JobMetrics
    report: Report
    flush_records: Callable[[], None]
    """Waits until all that was reported is on disk: a step before a checkpoint is never run again."""
    telemetry: Snapshot
    stop_early: Callable[[Sequence[float]], bool] | None = None
    """Of a timing run: whether the seconds of its steps past the warm-up are enough to end it. None: it runs all its steps."""
    logged_skips: set[tuple[Loader, int]] = field(default_factory=set)
    """Unreadable images that the log has named: the loader, and the image's index."""

    @property
    def student(self) -> nn.Module:
        """The bare student, trained through `train_state.ddp_module`, which wraps it with its methods."""
        return self.train_state.distillation_module.student

    @property
    def epochs(self) -> Epochs:
        return self.train_state.epochs

    @property
    def progress(self) -> Progress:
        return self.checkpoint_state.progress

    def close(self) -> None:
        """End the loaders' threads, and release what they use on this node. The job can train no more."""
        with contextlib.ExitStack() as stack:
            stack.callback(self.val_loader.close)
            stack.callback(self.train_loader.close)
            if self.train_state.teacher is not None:
                stack.callback(self.train_state.teacher.close)


def build(
    config: TrainConfig,
    group: Group,
    report: Report,
    telemetry: Snapshot,
    *,
    stop_early: Callable[[Sequence[float]], bool] | None = None,
    connections: Sequence[TeacherConnection] = (),
    flush_records: Callable[[], None] = lambda: None,
) -> Job:
    """Open the data, build and wrap the models, and continue from the stage's last checkpoint if there is one.

    `connections`: to the actors of `teacher.service`; `flush_records`: for a `report` that leaves writing to another thread.

    Raises:
        DataError, ModelError, CheckpointError, ExperimentError: what the experiment names does not exist or does not fit.
    """
    if problem := first_problem(config):
        raise ExperimentError(problem)
    classes, (train_loader, val_loader) = open_loaders(config, group)
    name, student = build_student(config, group, len(classes))
    module, teacher = build_modules(config, group, student, classes, train_loader, connections)
    module.methods.to(group.device, tensor_format(config)[0])
    if config.train.compile:  # in place: names in the checkpoint stay as they are
        student.compile()
    optimizers = build_stage_optimizers(config, module)
    scaler = torch.amp.GradScaler(group.device.type, enabled=config.precision == "fp16")
    checkpoint_state = CheckpointState(
        student=student,
        methods=module.methods,
        optimizers=[each.optimizer for each in optimizers],
        scaler=scaler,
        progress=Progress(),
        about=describe(config, name, classes),
    )
    stage = StageDir(Path(config.output_dir))
    seed_rank(config.seed, group.rank)
    # Rank 0 decides for all: a shared file system may show a file to one node later than to another.
    if gather_objects(stage.last.exists(), group)[0]:
        checkpoint.restore(stage.last, checkpoint_state, group)
    data = config.data
    normalize = normalizer(data.mean, data.std, group.device, *tensor_format(config))
    epochs = Epochs(
        num_init=0 if config.train.max_steps is not None else module.init_epochs,  # a timing run times the training
        num_training=config.optim.epochs,
        steps_per_epoch=train_loader.steps_per_epoch,
        augmentation=train_loader.augmentation_epoch,
    )
    settings = UpdateSettings(scaler, group, config.optim.clip_grad_norm)
    module.begin_stage(0)  # before DDP looks which gradients there will be
    update, noise = build_update(module, optimizers, settings, accumulate=config.optim.accumulate)
    train_state = TrainState(
        distillation_module=module,
        ddp_module=update.module,
        teacher=teacher,
        optimizers=optimizers,
        training_update=update,
        update_settings=settings,
        group=group,
        prepare=TrainInputs(data.device_augment, normalize, seed=config.seed, image_size=data.image_size, device=group.device),
        autocast=autocast(config.precision, group.device),
        epochs=epochs,
        num_blank_images=0 if accepts_empty_batches(student) else 2,
        accumulate=config.optim.accumulate,
        noise=noise,
        cpu_group=cpu_process_group(group) if module.methods else None,
    )
    return Job(
        config=config,
        group=group,
        stage=stage,
        train_loader=train_loader,
        val_loader=val_loader,
        train_state=train_state,
        normalize=normalize,
        checkpoint_state=checkpoint_state,
        metrics=build_metrics(config, train_state, checkpoint_state.progress),
        report=report,
        flush_records=flush_records,
        telemetry=telemetry,
        stop_early=stop_early,
    )


def build_student(config: TrainConfig, group: Group, num_classes: int) -> tuple[str, nn.Module]:
    """The student's full name and the student on its device."""
    name = student_name(config.model, config.teacher, selected_methods(config))
    student = build_model(name, num_classes=num_classes, image_size=config.data.image_size, seed=config.seed)
    dtype, layout = tensor_format(config)
    student = student.to(group.device, dtype).to(memory_format=layout)
    return name, convert(student, group) if config.scale.sync_batch_norm else student


def describe(config: TrainConfig, name: str, classes: Sequence[str]) -> dict[str, Any]:
    """The description of the model in its checkpoints."""
    data = config.data
    return {
        "stage": config.stage,
        "model": name,
        "num_classes": len(classes),
        "classes": list(classes),
        "seed": config.seed,
        "image_size": data.image_size,
        "val_resize": data.val_resize,
        "mean": list(data.mean),
        "std": list(data.std),
    }


def build_stage_optimizers(config: TrainConfig, module: DistillationModule) -> tuple[LossOptimizer, ...]:
    """The optimizers of student and methods.

    What is never trained is in none of them. What the init stage alone trains is in its optimizer, which it shares with the
    training.
    """
    if not module.init_epochs:
        module.begin_stage(0)
    return build_optimizers(module.student, module.methods_by_name, config.optim)


def build_update(
    module: DistillationModule, optimizers: Sequence[LossOptimizer], settings: UpdateSettings, *, accumulate: int
) -> tuple[ParameterUpdate, GradientNoise | None]:
    """How a step of the training changes the parameters, and what measures its gradient noise, where that can be done."""
    if len(optimizers) > 1:
        return PerLossUpdate(module, optimizers, settings), None
    ddp_module = wrap(module, settings.group)
    noise = measure_noise(ddp_module, settings.group, accumulate)
    if noise is None:
        return SharedUpdate(ddp_module, optimizers[0], settings), None
    return MeasuredUpdate(ddp_module, optimizers[0], settings, noise), noise


def build_metrics(config: TrainConfig, train_state: TrainState, progress: Progress) -> JobMetrics:
    """What is measured of a job, continued from `progress`."""
    device, epochs = train_state.group.device, train_state.epochs
    # Where there are several epochs the first one is left out: it fills caches, and its disk reads are cold.
    several_epochs = config.train.max_steps is None and config.optim.epochs - progress.epoch > 1
    warmup_steps = max(config.train.warmup_steps, epochs.steps_per_epoch if several_epochs else 0)
    warmup_steps += max(-epochs.training_step(progress.step), 0)
    # Never before the first step, which searches; by default before the warm-up's last one, so that no step measured is slow.
    first_memory_step = progress.step + (warmup_steps if several_epochs else max(warmup_steps - 1, 1))
    return JobMetrics(
        timer=PhaseTimer(device, warmup_steps=warmup_steps),
        host=HostUse(warmup_steps),
        throughput=Throughput(progress.step + warmup_steps, warm=progress.warm, cold=progress.cold),
        clock=WallClock(progress.wall, progress.epoch_wall),
        noise=NoiseHistory(progress.noise),
        allreduce_wait=AllreduceWait(train_state.ddp_module, device, log_every=config.train.log_every, warmup_steps=warmup_steps),
        peak_memory=PeakMemory(device, first_memory_step),
    )


def open_loaders(config: TrainConfig, group: Group) -> tuple[tuple[str, ...], tuple[Loader, Loader]]:
    """The class names, and this rank's loaders of the training and the validation split."""
    data = config.data
    if not isinstance(data.loader_workers, int):
        raise ExperimentError("data.loader_workers is `auto`: the driver resolves it before a job is built")
    check_decoder(data, group.device, max(1, data.loader_workers))
    sources = {"train": open_on_node(data, "train"), "val": open_on_node(data, "val")}

    def loader(split: Split) -> Loader:
        assert isinstance(data.loader_workers, int)
        training = split == "train"
        return Loader(
            sources[split],
            data,
            split=split,
            seed=config.seed,
            rank=group.rank,
            world_size=group.world_size,
            loader_workers=data.loader_workers,
            device=group.device,
            auto=AutoWorkers(data.loader_workers) if config.loader_auto and training else None,
            num_augmentation_epochs=config.num_augmentation_epochs if training else None,
        )

    return sources["train"].classes, (loader("train"), loader("val"))


def wrap(model: DistillationModule, group: Group) -> nn.Module:
    """`model` under DDP where there are several ranks."""
    if group.world_size == 1:
        return model
    # Ranks need not agree on batch norm's statistics before an evaluation, which takes rank 0's, as a checkpoint does.
    option = "forward_sync_buffers" if "forward_sync_buffers" in SIGNATURE.parameters else "broadcast_buffers"
    unshared: dict[str, Any] = {option: False}
    ids = [group.device] if group.device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True, **unshared)
