"""A job as one rank sees it: data opened, models built and wrapped, the last checkpoint taken up. Knows no Ray."""

from __future__ import annotations

import contextlib
import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainables import checkpoint
from trainables.answers.kept import KeptTeacher, keeps, open_store
from trainables.checkpoint import Progress, TrainState
from trainables.config import TrainConfig
from trainables.data.auto import Enough
from trainables.data.loader import Loader
from trainables.data.order import Split
from trainables.data.source import open_on_node
from trainables.device.augment import TrainInputs
from trainables.device.decode import check_decoder
from trainables.distributed import Group, gather_objects, seed_rank
from trainables.errors import ExperimentError
from trainables.gather import hosts_group
from trainables.global_batch_norm import convert, normalizes_alone
from trainables.inputs import autocast, normalizer
from trainables.methods.pupil import Pupil, Reader, build_methods, check_reads_logits, choose, student_name, task_weight
from trainables.models.registry import build_model
from trainables.models.reused import ReusedClassifier
from trainables.noise_scale import NoiseHistory, watch
from trainables.rundir import StageDir
from trainables.several import load_network, teacher_reader
from trainables.step import Learner
from trainables.teacher import Answers, Teacher
from trainables.throughput import Throughput
from trainables.timing import PhaseTimer
from trainables.updates import Updates, build_updates
from trainables.waits import AllreduceWait

log = logging.getLogger("raydistill")
SIGNATURE = inspect.signature(DistributedDataParallel)
"""torch 2.14 has given an option another name."""


class Report(Protocol):
    """Where numbers go. `kind`: `start`, `step` (a log line), `epoch` (a barrier over ranks), `summary`."""

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
    learner: Learner
    normalize: Callable[[Tensor], Tensor]
    """From uint8 images_BCHW on the device to the models' input, for evaluation; training augments too."""
    model: nn.Module
    """The bare student; `learner.student` wraps it."""
    state: TrainState
    timer: PhaseTimer
    throughput: Throughput
    noise: NoiseHistory
    report: Report
    telemetry: Snapshot
    waits: AllreduceWait
    enough: Callable[[Sequence[float]], bool] | None = None
    """Of a timing run: whether the seconds of its steps past the warm-up say how long a step takes. None: it runs them all."""
    named: set[tuple[Loader, int]] = field(default_factory=set)
    """Unreadable images that the log has named: whose, and which."""

    def close(self) -> None:
        """End the loaders' threads, and let go of what they keep on this node. The job can train no more."""
        with contextlib.ExitStack() as stack:
            stack.callback(self.val_loader.close)
            stack.callback(self.train_loader.close)
            if self.learner.teacher is not None:
                stack.callback(self.learner.teacher.close)


def build(
    config: TrainConfig,
    group: Group,
    report: Report,
    telemetry: Snapshot,
    enough: Callable[[Sequence[float]], bool] | None = None,
) -> Job:
    """Open the data, build and wrap the models, and continue from the stage's last checkpoint if there is one.

    Raises:
        DataError, ModelError, CheckpointError, ExperimentError: what the experiment asks for does not exist or does not fit.
    """
    data, device = config.data, group.device
    classes, (train_loader, val_loader) = open_loaders(config, group)
    dtype, layout = numbers(config)
    name = student_name(config.model, config.teacher, choose(config.distill) if config.distill is not None else ())
    model = build_model(name, num_classes=len(classes), image_size=data.image_size, seed=config.seed)
    model = model.to(device, dtype).to(memory_format=layout)
    if config.scale.sync_batch_norm:  # torch's is fused, and for GPUs only
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model) if device.type == "cuda" else convert(model, group)
    pupil, teacher = build_pupil(config, group, model, classes, train_loader)
    pupil.methods.to(device, dtype)
    if config.train.compile:  # in place: names in the checkpoint stay as they are
        model.compile()
    stage = StageDir(Path(config.output_dir))
    updates = Updates(build_updates(model, pupil.methods_by_name, config.optim), group, config.optim.clip_grad_norm)
    if updates.several and pupil.init_epochs:
        raise ExperimentError(
            f"distill.method: {', '.join(config.distill.method if config.distill else ())} has a warm-up stage, which has one"
            " optimizer: leave out optim.losses, and set optim.name to sgd or adamw"
        )
    pupil.settle(True)  # before DDP looks which gradients there will be
    scaler = torch.amp.GradScaler(device.type, enabled=config.precision == "fp16")
    about = {
        "stage": config.stage, "model": name, "num_classes": len(classes), "classes": list(classes), "seed": config.seed,
        "image_size": data.image_size, "val_resize": data.val_resize, "mean": list(data.mean), "std": list(data.std),
    }  # fmt: skip
    state = TrainState(model, pupil.methods, [update.optimizer for update in updates.updates], scaler, Progress(), about)
    seed_rank(config.seed, group.rank)
    # Rank 0 decides for all: a shared file system may show a file to one node later than to another.
    if gather_objects(stage.last.exists(), group)[0]:
        checkpoint.restore(stage.last, state, group)
    normalize = normalizer(data.mean, data.std, device, dtype, layout)
    student = pupil if updates.several else wrap(pupil, group)
    learner = Learner(
        pupil=pupil,
        student=student,
        teacher=teacher,
        updates=updates,
        scaler=scaler,
        group=group,
        prepare=TrainInputs(data.device_augment, normalize, seed=config.seed, image_size=data.image_size, device=device),
        autocast=autocast(config.precision, device),
        steps_per_epoch=train_loader.steps_per_epoch,
        init_epochs=pupil.init_epochs,
        blanks=2 if normalizes_alone(model) else 0,
        accumulate=config.optim.accumulate,
        noise=None if updates.several else watch(student, group, config.optim.accumulate),
        hosts=hosts_group(group) if pupil.needs_whole_batch else None,
    )
    # Where there are several epochs the first one stands apart: it fills caches and meets the disk cold.
    several = config.train.max_steps is None and config.optim.epochs - state.progress.epoch > 1
    warmup = max(config.train.warmup_steps, train_loader.steps_per_epoch if several else 0)
    timer, throughput = (
        PhaseTimer(device, warmup_steps=warmup),
        Throughput(state.progress.step + warmup, warm=state.progress.warm, cold=state.progress.cold),
    )
    noise = NoiseHistory(state.progress.noise)
    return Job(
        config, group, stage, train_loader, val_loader, learner, normalize, model, state, timer, throughput, noise, report,
        telemetry, AllreduceWait(learner.student, device, config.train.log_every, warmup), enough,
    )  # fmt: skip


def numbers(config: TrainConfig) -> tuple[torch.dtype, torch.memory_format]:
    """The type of the models' numbers, and how the images' lie in memory."""
    layout = torch.channels_last if config.train.channels_last else torch.contiguous_format
    return torch.float64 if config.precision == "fp64" else torch.float32, layout


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
            sources[split], data, split=split, seed=config.seed, rank=group.rank, world_size=group.world_size,
            loader_workers=data.loader_workers, device=group.device,
            auto=Enough(data.loader_workers) if config.loader_auto and split == "train" else None,
            seed_epochs=config.seed_epochs if split == "train" else None,
        )  # fmt: skip

    return sources["train"].classes, (loader("train"), loader("val"))


def build_pupil(
    config: TrainConfig, group: Group, student: nn.Module, classes: tuple[str, ...], loader: Loader
) -> tuple[Pupil, Answers | None]:
    """The student with its methods, on the CPU, and the teacher where one of them reads it: a network, or what it answered.

    Raises:
        ExperimentError, ModelError, CheckpointError: what the experiment asks for does not fit together.
    """
    given, size = config.teacher, config.data.image_size
    chosen = choose(config.distill) if config.distill is not None else ()
    if config.distill is None or not chosen:
        return Pupil(student, task_weight=task_weight(config.distill, ()) if config.distill is not None else 1.0), None
    taught = given is not None and given.weights is not None and any(method.kind.needs.teacher for method in chosen)
    kept = taught and given is not None and given.cache is not None
    if kept:
        check_reads_logits(chosen)
        if isinstance(student, ReusedClassifier):
            raise ExperimentError(
                f"teacher.cache: it keeps logits, and {config.model} takes in the teacher's classifier: leave it out"
            )
    model = load_network(given, classes, size, config.seed) if given is not None and taught and not kept else None
    if model is not None and isinstance(student, ReusedClassifier):
        student.reuse(model, size)
    reader = Reader(student, {c.key: c.student_taps for c in chosen}, name=config.model, image_size=size)
    of_teacher = teacher_reader(given, model, chosen, size) if model is not None and given is not None else None
    methods = build_methods(
        chosen, student, model, (reader, of_teacher), num_classes=len(classes), labels_M=loader.labels_M, image_size=size,
        global_batch_size=config.data.global_batch_size, seed=config.seed, epochs=config.optim.epochs, group=group,
    )  # fmt: skip
    teacher: Answers | None = None
    if model is not None and of_teacher is not None:
        place(model, config, group)
        teacher = Teacher(model, of_teacher, gradient=any(method.kind.needs.teacher_gradient for method in chosen))
    elif kept:
        teacher = kept_teacher(config, group, classes, loader, [c.key for c in chosen])
    pupil = Pupil(
        student, methods, {c.key: c.options for c in chosen}, reader=reader,
        task_weight=task_weight(config.distill, chosen), epochs=config.optim.epochs,
    )  # fmt: skip
    if pupil.needs_whole_batch and config.optim.accumulate > 1:
        names = ", ".join(config.distill.method)
        raise ExperimentError(
            f"distill.method: {names} compares the samples of a batch, which optim.accumulate {config.optim.accumulate} parts: "
            "set optim.accumulate to 1, or use more workers"
        )
    return pupil, teacher


def place(frozen: nn.Module, config: TrainConfig, group: Group) -> None:
    """Bring a network that is not trained to where it runs."""
    dtype, layout = numbers(config)
    frozen.to(group.device, dtype).to(memory_format=layout)
    if config.train.compile:
        frozen.compile()


def kept_teacher(
    config: TrainConfig, group: Group, classes: tuple[str, ...], loader: Loader, methods: Sequence[str]
) -> KeptTeacher:
    """The teacher whose logits are in `teacher.cache`; its network is built when one of them is missing.

    Raises:
        DistillError: see `open_store`.
    """
    given, size = config.teacher, config.data.image_size
    assert given is not None
    name = given.model

    def run() -> Teacher:
        log.info("%s: teacher.cache does not hold all of what is asked: %s runs", config.stage, name)
        network = load_network(given, classes, size, config.seed)
        place(network, config, group)
        return Teacher(network, Reader(network, dict.fromkeys(methods, ()), name=name, image_size=size))

    store = open_store(config, group, loader, classes)
    return KeptTeacher(store, methods, run, device=group.device, dtype=numbers(config)[0], keeps=keeps(config))


def wrap(model: Pupil, group: Group) -> nn.Module:
    """`model` under DDP where there are several ranks."""
    if group.world_size == 1:
        return model
    # Ranks need not agree on batch norm's statistics before an evaluation, which takes rank 0's, as a checkpoint does.
    option = "forward_sync_buffers" if "forward_sync_buffers" in SIGNATURE.parameters else "broadcast_buffers"
    unshared: dict[str, Any] = {option: False}
    ids = [group.device] if group.device.type == "cuda" else None
    return DistributedDataParallel(model, device_ids=ids, gradient_as_bucket_view=True, **unshared)
