"""A job as one rank sees it: data opened, models built and wrapped, the last checkpoint taken up. Knows no Ray."""

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
from trainables.device.model_input import autocast, normalizer
from trainables.distributed.batch_norm import convert, accepts_empty_batches
from trainables.distributed.gather import cpu_process_group
from trainables.distributed.group import Group, gather_objects, seed_rank
from trainables.engine import checkpoint
from trainables.engine.checkpoint import Progress, CheckpointState
from trainables.engine.modules import build_modules, numbers
from trainables.engine.optimizers import Updates, build_updates
from trainables.engine.step import TrainState
from trainables.errors import ExperimentError
from trainables.methods.distillation_module import DistillationModule
from trainables.methods.select import select_methods, student_name
from trainables.metrics.allreduce_wait import AllreduceWait
from trainables.metrics.host_use import HostUse
from trainables.metrics.noise_scale import NoiseHistory, measure_noise
from trainables.metrics.phase_timer import PhaseTimer
from trainables.metrics.throughput import Throughput
from trainables.metrics.wall_clock import WallClock
from trainables.models.registry import build_model
from trainables.rundir import StageDir
from trainables.teachers.service.client import PREFETCH_BATCHES
from trainables.teachers.service.protocol import TeacherConnection

SIGNATURE = inspect.signature(DistributedDataParallel)
"""torch 2.14 has given an option another name."""


class Report(Protocol):
    """Where numbers go. `kind`: `start`, `step` (a log line), `epoch` (every rank calls it), `summary`; see `metrics_file`."""

    def __call__(self, kind: str, step: int, epoch: float, metrics: dict[str, float]) -> None: ...


class Snapshot(Protocol):
    """What the nodes did since the last call, or (`whole`) since the job began; every rank calls it."""

    def __call__(self, whole: bool = False) -> dict[str, float]: ...


@dataclass
class Job:
    """One training job as this rank sees it."""

    config: TrainConfig
    group: Group
    stage: StageDir
    train_loader: Loader
    val_loader: Loader
    train_state: TrainState
    normalize: Callable[[Tensor], Tensor]
    """From uint8 images_BCHW on the device to the models' input, for evaluation; training augments too."""
    model: nn.Module
    """The bare student; `train_state.ddp_module` wraps it."""
    state: CheckpointState
    timer: PhaseTimer
    host: HostUse
    throughput: Throughput
    clock: WallClock
    noise: NoiseHistory
    report: Report
    flush_records: Callable[[], None]
    """Waits until what `report` was given is on disk: a step before a checkpoint is never run again."""
    telemetry: Snapshot
    waits: AllreduceWait
    memory_from: int
    """Before this step the peak of the memory begins anew; the step fetches again what the allocator has given back."""
    enough: Callable[[Sequence[float]], bool] | None = None
    """Of a timing run: whether the seconds of its steps past the warm-up say how long a step takes. None: it runs them all."""
    memory_peak: tuple[int, int] | None = None
    """`loop.memory_peak` of the first epoch with a step from `memory_from` on, before its evaluation."""
    named: set[tuple[Loader, int]] = field(default_factory=set)
    """Unreadable images that the log has named: whose, and which."""

    def close(self) -> None:
        """End the loaders' threads, and let go of what they keep on this node. The job can train no more."""
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
    enough: Callable[[Sequence[float]], bool] | None = None,
    connections: Sequence[TeacherConnection] = (),
    flush_records: Callable[[], None] = lambda: None,
) -> Job:
    """Open the data, build and wrap the models, and continue from the stage's last checkpoint if there is one.

    `connections` lead to the actors of `teacher.service`; `flush_records` is for a `report` that leaves writing to another thread.

    Raises:
        DataError, ModelError, CheckpointError, ExperimentError: what the experiment asks for does not exist or does not fit.
    """
    data, device = config.data, group.device
    classes, (train_loader, val_loader) = open_loaders(config, group)
    dtype, layout = numbers(config)
    name = student_name(config.model, config.teacher, select_methods(config.distill) if config.distill is not None else ())
    model = build_model(name, num_classes=len(classes), image_size=data.image_size, seed=config.seed)
    model = model.to(device, dtype).to(memory_format=layout)
    if config.scale.sync_batch_norm:
        model = convert(model, group)
    distillation_module, teacher = build_modules(config, group, model, classes, train_loader, connections)
    distillation_module.methods.to(device, dtype)
    if config.train.compile:  # in place: names in the checkpoint stay as they are
        model.compile()
    stage = StageDir(Path(config.output_dir))
    if (
        not distillation_module.init_epochs
    ):  # what is never trained has no optimizer; an init stage's one has what is settled after it
        distillation_module.begin_stage(0)
    updates = Updates(
        build_updates(model, distillation_module.methods_by_name, config.optim),
        group,
        config.optim.clip_grad_norm,
        distillation_module.init_lr,
    )
    init_epochs = 0 if config.train.max_steps is not None else distillation_module.init_epochs  # a timing run times the training
    distillation_module.begin_stage(0)  # before DDP looks which gradients there will be
    scaler = torch.amp.GradScaler(device.type, enabled=config.precision == "fp16")
    about = {
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
    state = CheckpointState(
        model, distillation_module.methods, [update.optimizer for update in updates.updates], scaler, Progress(), about
    )
    seed_rank(config.seed, group.rank)
    # Rank 0 decides for all: a shared file system may show a file to one node later than to another.
    if gather_objects(stage.last.exists(), group)[0]:
        checkpoint.restore(stage.last, state, group)
    normalize = normalizer(data.mean, data.std, device, dtype, layout)
    student = distillation_module if updates.several else wrap(distillation_module, group)
    train_state = TrainState(
        distillation_module=distillation_module,
        student=student,
        teacher=teacher,
        updates=updates,
        scaler=scaler,
        group=group,
        prepare=TrainInputs(data.device_augment, normalize, seed=config.seed, image_size=data.image_size, device=device),
        autocast=autocast(config.precision, device),
        steps_per_epoch=train_loader.steps_per_epoch,
        init_epochs=init_epochs,
        blanks=0 if accepts_empty_batches(model) else 2,
        accumulate=config.optim.accumulate,
        noise=None if updates.several else measure_noise(student, group, config.optim.accumulate),
        hosts=cpu_process_group(group) if distillation_module.methods else None,
    )
    # Where there are several epochs the first one stands apart: it fills caches and meets the disk cold.
    several = config.train.max_steps is None and config.optim.epochs - state.progress.epoch > 1
    warmup = max(config.train.warmup_steps, train_loader.steps_per_epoch if several else 0)
    warmup += max(init_epochs * train_loader.steps_per_epoch - state.progress.step, 0)
    # Never before the first step, which searches; by default before the warm-up's last one, so that no step measured is slow.
    memory_from = state.progress.step + (warmup if several else max(warmup - 1, 1))
    timer, throughput = (
        PhaseTimer(device, warmup_steps=warmup),
        Throughput(state.progress.step + warmup, warm=state.progress.warm, cold=state.progress.cold),
    )
    noise, clock = NoiseHistory(state.progress.noise), WallClock(state.progress.wall, state.progress.epoch_wall)
    return Job(
        config,
        group,
        stage,
        train_loader,
        val_loader,
        train_state,
        normalize,
        model,
        state,
        timer,
        HostUse(warmup),
        throughput,
        clock,
        noise,
        report,
        flush_records,
        telemetry,
        AllreduceWait(train_state.ddp_module, device, config.train.log_every, warmup),
        memory_from,
        enough,
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
        return Loader(
            sources[split],
            data,
            split=split,
            seed=config.seed,
            rank=group.rank,
            world_size=group.world_size,
            loader_workers=data.loader_workers,
            device=group.device,
            auto=AutoWorkers(data.loader_workers) if config.loader_auto and split == "train" else None,
            num_augmentation_epochs=config.num_augmentation_epochs if split == "train" else None,
            held=PREFETCH_BATCHES
            if split == "train" and config.teacher is not None and config.teacher.service is not None
            else 0,
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
