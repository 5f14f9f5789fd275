"""Epochs: train, evaluate, checkpoint, report. Knows neither Ray nor MLflow: `report` is a callable."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainables import checkpoint
from trainables.checkpoint import Progress, TrainState
from trainables.config import EvaluateConfig, TrainConfig
from trainables.data.loader import Loader
from trainables.data.source import open_source
from trainables.distributed import Group, all_reduce_sum, check_replicas, gather_objects, seed_rank
from trainables.errors import DataError, ExperimentError, TrainingError
from trainables.evaluate import evaluate
from trainables.models.registry import build_model, check_forward
from trainables.models.weights import load_teacher
from trainables.optim import build_optimizer, learning_rate, peak_learning_rate, set_learning_rate
from trainables.rundir import StageDir
from trainables.step import SUMS, Learner, train_step
from trainables.throughput import Throughput
from trainables.timing import PhaseTimer

log = logging.getLogger("raydistill")

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Report(Protocol):
    """Where numbers go. `kind`: `start`, `step` (a log line), `epoch` (a barrier over ranks), `summary`."""

    def __call__(self, kind: str, step: int, epoch: float, metrics: dict[str, float]) -> None: ...


@dataclass
class Job:
    """One training job as this rank sees it."""

    config: TrainConfig
    group: Group
    stage: StageDir
    train_loader: Loader
    val_loader: Loader
    learner: Learner
    model: nn.Module
    """The bare student; `learner.student` wraps it."""
    state: TrainState
    timer: PhaseTimer
    throughput: Throughput
    report: Report
    telemetry: Callable[[], dict[str, float]]


def build(config: TrainConfig, group: Group, report: Report, telemetry: Callable[[], dict[str, float]]) -> Job:
    """Open the data, build and wrap the models, and continue from the stage's last checkpoint if there is one.

    Raises:
        DataError, ModelError, CheckpointError, ExperimentError: what the experiment asks for does not exist or does not fit.
    """
    device, data, train = group.device, config.data, config.train
    stage = StageDir(checkpoint.Path(config.output_dir))
    train_source, val_source = open_source(data, "train"), open_source(data, "val")
    if not isinstance(data.loader_workers, int):
        raise ExperimentError("data.loader_workers is `auto`: the driver resolves it before a job is built")
    loaders = [
        Loader(source, data, split=split, seed=config.seed, rank=group.rank, world_size=group.world_size,
               loader_workers=data.loader_workers, pin_memory=device.type == "cuda")
        for source, split in ((train_source, "train"), (val_source, "val"))
    ]  # fmt: skip
    num_classes = len(train_source.classes)
    dtype = torch.float64 if config.precision == "fp64" else torch.float32
    layout = torch.channels_last if train.channels_last else torch.contiguous_format
    model = build_model(config.model, num_classes=num_classes, image_size=data.image_size, seed=config.seed)
    check_forward(model, data.image_size, num_classes)
    model.to(device=device, dtype=dtype, memory_format=layout)
    teacher = None
    distill = config.distill if config.teacher is not None else None
    if config.teacher is not None and config.teacher.weights and (config.distill.soft_weight or config.distill.method_weight):
        teacher = load_teacher(
            config.teacher.model, config.teacher.weights, num_classes=num_classes, image_size=data.image_size,
            classes=train_source.classes, seed=config.seed,
        )  # fmt: skip
        teacher.to(device=device, dtype=dtype, memory_format=layout).eval().requires_grad_(False)
    student: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model) if config.scale.sync_batch_norm else model
    model = student
    if train.compile:
        student.compile()  # in place: names in the checkpoint stay as they are
        if teacher is not None:
            teacher.compile()
    optimizer = build_optimizer(student, config.optim)
    if group.world_size > 1:
        student = DistributedDataParallel(
            student,
            device_ids=[device] if device.type == "cuda" else None,
            gradient_as_bucket_view=True,
            broadcast_buffers=any(True for _ in model.buffers()),
        )
    scaler = torch.amp.GradScaler(device.type, enabled=config.precision == "fp16")
    about = {
        "stage": config.stage, "model": config.model, "num_classes": num_classes, "classes": list(train_source.classes),
        "image_size": data.image_size, "val_resize": data.val_resize, "mean": list(data.mean), "std": list(data.std),
        "seed": config.seed,
    }  # fmt: skip
    state = TrainState(model, optimizer, scaler, Progress(), about)
    if stage.last.exists():
        checkpoint.restore(stage.last, state, group)
    else:
        seed_rank(config.seed, group.rank)
    learner = Learner(
        student=student, teacher=teacher, distill=distill, optimizer=optimizer, scaler=scaler, group=group,
        prepare=normalizer(data.mean, data.std, device, dtype, layout), autocast=autocast(config.precision, device),
        sums=torch.zeros(len(SUMS), dtype=torch.float64, device=device),
        bad_step=torch.full((), -1, dtype=torch.int64, device=device),
        accumulate=config.optim.accumulate, clip_grad_norm=config.optim.clip_grad_norm,
    )  # fmt: skip
    # Where there are several epochs the first one stands apart: it fills caches and meets the disk cold.
    several = train.max_steps is None and config.optim.epochs - state.progress.epoch > 1
    warmup = max(train.warmup_steps, loaders[0].steps_per_epoch if several else 0)
    return Job(
        config=config, group=group, stage=stage, train_loader=loaders[0], val_loader=loaders[1], learner=learner, model=model,
        state=state, timer=PhaseTimer(device, warmup_steps=warmup), throughput=Throughput(warmup), report=report, telemetry=telemetry,
    )  # fmt: skip


def autocast(precision: str, device: torch.device) -> Callable[[], contextlib.AbstractContextManager[None]]:
    """A factory of the autocast context of `precision`; none for fp32 and fp64."""
    if precision not in AUTOCAST:
        return contextlib.nullcontext
    return lambda: torch.autocast(device.type, AUTOCAST[precision])


def normalizer(
    mean: tuple[float, ...], std: tuple[float, ...], device: torch.device, dtype: torch.dtype, layout: torch.memory_format
) -> Callable[[Tensor], Tensor]:
    """A function from uint8 images_BCHW anywhere to (x/255 − mean)/std on `device`, one multiply and one add."""
    mean_C11 = torch.tensor(mean, dtype=torch.float64).view(-1, 1, 1)
    std_C11 = torch.tensor(std, dtype=torch.float64).view(-1, 1, 1)
    scale = (1 / (255 * std_C11)).to(device, dtype)
    shift = (-mean_C11 / std_C11).to(device, dtype)
    return lambda images: torch.addcmul(shift, images.to(device, dtype, non_blocking=True, memory_format=layout), scale)


def run(job: Job) -> dict[str, float]:
    """Train to the configured end, from wherever the job stands. Returns the summary, on every rank.

    Raises:
        TrainingError: a loss or a parameter that is not finite, or replicas that disagree.
        DataError, CheckpointError: see their own modules.
    """
    config, progress = job.config, job.state.progress
    job.report(
        "start", progress.step, progress.epoch,
        {"steps_per_epoch": job.train_loader.steps_per_epoch, "samples_per_epoch": job.train_loader.samples_per_epoch,
         "epochs": config.optim.epochs, "max_steps": (config.train.max_steps or 0) + config.train.warmup_steps if config.train.max_steps else 0,
         "num_workers": job.group.world_size},
    )  # fmt: skip
    if config.train.max_steps is not None:
        return run_timing(job)
    while progress.epoch < config.optim.epochs:
        train_epoch(job)
        finish_epoch(job)
    return summarize(job)


def run_timing(job: Job) -> dict[str, float]:
    """Warm up, run `max_steps` steps and stop: throughput and phase times, no evaluation, no checkpoint."""
    last = job.config.train.warmup_steps + (job.config.train.max_steps or 0)
    while job.state.progress.step < last:
        train_epoch(job, stop_at=last)
        job.state.progress.epoch += 1
        job.state.progress.position = 0
    return summarize(job)


def train_epoch(job: Job, stop_at: int | None = None) -> None:
    """The rest of the current epoch, or up to the step `stop_at`."""
    config, group, progress, learner, timer = job.config, job.group, job.state.progress, job.learner, job.timer
    steps_per_epoch = job.train_loader.steps_per_epoch
    peak = peak_learning_rate(config.optim, config.data.global_batch_size)
    learner.student.train()
    batches = job.train_loader.epoch(progress.epoch, progress.position)
    job.throughput.begin(progress.step)
    timer.start()
    try:
        for batch in batches:
            timer.mark("data")
            set_learning_rate(learner.optimizer, learning_rate(progress.step, steps_per_epoch, config.optim, peak))
            train_step(learner, batch, progress.step, timer)
            timer.stop()
            progress.step += 1
            progress.position = batch.position
            in_epoch = -(-progress.position // config.data.global_batch_size)
            done = in_epoch == steps_per_epoch or progress.step == stop_at
            if done or in_epoch % config.train.log_every == 0 or progress.step == config.train.warmup_steps:
                log_step(job, in_epoch)
            if done:
                break
            if in_epoch % config.train.checkpoint_every == 0 and stop_at is None:
                save_inside_epoch(job, in_epoch)
            timer.start()
    finally:
        batches.close()


def log_step(job: Job, in_epoch: int) -> None:
    """The one place that waits for the device: read the sums of all ranks, stop at a loss that is not finite, say a line."""
    learner, progress, group = job.learner, job.state.progress, job.group
    mine = torch.cat([learner.sums, (learner.bad_step.double() >= 0).double().reshape(1)])
    local = learner.sums.clone()
    totals = all_reduce_sum(mine, group).tolist()
    learner.sums.zero_()
    images = totals[0]
    images_per_s = job.throughput.end(images, progress.step)
    job.timer.collect()
    if totals[-1]:
        stop_not_finite(job)
    progress.partial = [a + b for a, b in zip(progress.partial or [0.0] * len(SUMS), totals, strict=False)]
    metrics = means(totals[: len(SUMS)])
    lr = learner.optimizer.param_groups[0]["lr"]
    phases = job.timer.take()
    job.report("step", progress.step, progress.epoch + in_epoch / job.train_loader.steps_per_epoch,
               {**metrics, "lr": lr, "images_per_s": images_per_s, **phases})  # fmt: skip
    if group.is_main:
        now, epoch = means(local.tolist()), means(progress.partial)
        log.info(
            "Epoch: [%d][%d/%d]  Time %.3f  Data %.3f  Loss %.4f (%.4f)  Acc@1 %.2f (%.2f)  Acc@5 %.2f (%.2f)  lr %.4g  %.1f images/s",
            progress.epoch + 1, in_epoch, job.train_loader.steps_per_epoch, phases.get("phase/step_ms", math.nan) / 1e3,
            phases.get("phase/data_ms", math.nan) / 1e3, now["loss"], epoch["loss"], now["top1_pct"], epoch["top1_pct"],
            now["top5_pct"], epoch["top5_pct"], lr, images_per_s,
        )  # fmt: skip


def means(sums: list[float]) -> dict[str, float]:
    """Sums over images as named means; accuracies in percent. No image: nan."""
    named = dict(zip(SUMS, sums, strict=True))
    n = named["images"] or math.nan
    percent = {f"{name}_pct": 100 * named[name] / n for name in ("top1", "top5")}
    return {**{name: named[name] / n for name in ("loss", "task_loss", "soft_loss", "method_loss")}, **percent}


def stop_not_finite(job: Job) -> None:
    steps = [step for step in gather_objects(int(job.learner.bad_step), job.group) if step >= 0]
    raise TrainingError(
        f"{job.config.stage}: the loss is not finite at step {min(steps) + 1}: lower optim.lr (now {job.config.optim.lr:g}), set "
        f"optim.clip_grad_norm, or use precision bf16 or fp32; {last_good(job)}"
    )


def last_good(job: Job) -> str:
    """Which state is left, for an error's line."""
    return f"the last good state is {job.stage.last}" if job.stage.last.exists() else "no checkpoint had been written yet"


def check_finite(job: Job) -> None:
    """Before anything is saved: an update that spoiled the parameters may follow a finite loss.

    Raises:
        TrainingError: on every rank (the replicas are equal).
    """
    total = sum((p.detach().double().abs().sum() for p in job.model.parameters()), start=torch.zeros((), device=job.group.device))
    if not math.isfinite(float(total)):
        raise TrainingError(
            f"{job.config.stage}: a parameter is not finite after step {job.state.progress.step}: lower optim.lr "
            f"(now {job.config.optim.lr:g}) or set optim.clip_grad_norm; {last_good(job)}"
        )


def save_inside_epoch(job: Job, in_epoch: int) -> None:
    """A checkpoint at a position inside the epoch; training goes on in the same loader."""
    if in_epoch % job.config.train.log_every:
        log_step(job, in_epoch)  # the sums belong to the state: they are read before it is saved
    check_replicas(job.model, job.group, job.state.progress.step)
    check_finite(job)
    checkpoint.save(job.stage.last, job.state, job.group)
    job.throughput.begin(job.state.progress.step)


def finish_epoch(job: Job) -> None:
    """Evaluate, check, save last and best, and report: the epoch counts once its checkpoint stands."""
    config, group, progress = job.config, job.group, job.state.progress
    check_replicas(job.model, group, progress.step)
    check_finite(job)
    began = time.perf_counter()
    batches = job.val_loader.epoch(0)
    try:
        val = evaluate(job.model, batches, job.learner.prepare, group, job.learner.autocast)
    finally:
        batches.close()
    eval_s = time.perf_counter() - began
    skipped = note_skipped(job)
    if not val["num_images"]:
        raise DataError(f"{config.data.path}: not one validation image could be read")
    progress.epoch, progress.position = progress.epoch + 1, 0
    metrics = {f"train/{name}": value for name, value in means(progress.partial).items()}
    metrics |= {f"val/{name}": value for name, value in val.items()}
    metrics |= {"eval_s": eval_s, "skipped_images": float(skipped)}
    progress.partial = []
    progress.history.append({"epoch": progress.epoch, "step": progress.step, **metrics})
    best = val["top1_pct"] > progress.best_top1_pct
    if best:
        progress.best_top1_pct, progress.best_epoch = val["top1_pct"], progress.epoch
        checkpoint.save(job.stage.best, job.state, group)
    checkpoint.save(job.stage.last, job.state, group)
    if group.is_main:
        log.info(
            "%s epoch %d/%d: val Acc@1 %.2f  Acc@5 %.2f  loss %.4f  (%d images, %.1f s)%s", config.stage, progress.epoch,
            config.optim.epochs, val["top1_pct"], val["top5_pct"], val["loss"], val["num_images"], eval_s, "  best" if best else "",
        )  # fmt: skip
    job.report("epoch", progress.step, float(progress.epoch), {**metrics, **throughput(job), **job.telemetry()})


def note_skipped(job: Job) -> int:
    """How many images all ranks could not read in this epoch; rank 0 names them in the log."""
    everyone = gather_objects({**job.train_loader.skipped, **job.val_loader.skipped}, job.group)
    skipped = {name: reason for part in everyone for name, reason in part.items()}
    if job.group.is_main:
        for name, reason in sorted(skipped.items()):
            log.warning("skipped %s: %s", name, reason)
    return len(skipped)


def throughput(job: Job) -> dict[str, float]:
    """Steady-state speed and the epoch time it gives; `epoch_projected` is 1 where no whole steady epoch was run."""
    speed = job.throughput.summary()
    if not speed:
        return {}
    steps = job.train_loader.steps_per_epoch
    return {**speed, "epoch_s": speed["step_s"] * steps, "epoch_projected": float(speed["steady_steps"] < steps)}


def summarize(job: Job) -> dict[str, float]:
    """The numbers of the whole job, reported once and returned."""
    progress = job.state.progress
    summary = {**throughput(job), **job.timer.summary(), **job.telemetry(), "steps": float(progress.step)}
    if job.group.device.type == "cuda":
        summary["peak_memory_mib"] = torch.cuda.max_memory_allocated(job.group.device) / 2**20
    if progress.history:
        last = progress.history[-1]
        summary |= {
            "top1_pct": last["val/top1_pct"], "top5_pct": last["val/top5_pct"], "val_loss": last["val/loss"],
            "best_top1_pct": progress.best_top1_pct, "best_epoch": float(progress.best_epoch),
            "skipped_images": max(row["skipped_images"] for row in progress.history),
        }  # fmt: skip
    job.report("summary", progress.step, float(progress.epoch), summary)
    return summary


def evaluate_checkpoint(config: EvaluateConfig, group: Group) -> dict[str, float]:
    """Exact accuracy of a checkpoint on the validation split of `config.data`, on every rank.

    Raises:
        CheckpointError, DataError: the file or the data cannot be read, or their classes differ.
    """
    source = open_source(config.data, "val")
    path = checkpoint.Path(config.checkpoint)
    _, about = checkpoint.read(path)
    dtype = torch.float64 if config.precision == "fp64" else torch.float32
    model = load_teacher(
        about["model"],
        str(path),
        num_classes=len(source.classes),
        image_size=config.data.image_size,
        classes=source.classes,
        seed=0,
    ).to(group.device, dtype)
    assert isinstance(config.data.loader_workers, int)
    loader = Loader(
        source, config.data, split="val", seed=0, rank=group.rank, world_size=group.world_size,
        loader_workers=config.data.loader_workers, pin_memory=group.device.type == "cuda",
    )  # fmt: skip
    prepare = normalizer(config.data.mean, config.data.std, group.device, dtype, torch.contiguous_format)
    try:
        result = evaluate(model, loader.epoch(0), prepare, group, autocast(config.precision, group.device))
    finally:
        loader.close()
    skipped = [name for part in gather_objects(loader.skipped, group) for name in part]
    return {**result, "skipped_images": float(len(skipped))}
