"""Epochs: train, evaluate, checkpoint, report. Knows neither Ray nor MLflow: `report` is a callable.

Names of numbers: `train/…` at a log line, `val/…` and `epoch/…` at an epoch's end, plain in the summary; see `metrics_file`.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean

import torch

from trainables.data.loader import Loader
from trainables.device.device_batches import on_device
from trainables.distributed.group import all_reduce_sum, check_replicas, gather_objects
from trainables.engine import checkpoint
from trainables.engine.evaluate import evaluate
from trainables.engine.job import Job
from trainables.engine.step import TrainState, train_step
from trainables.errors import DataError, TrainingError
from trainables.metrics.allreduce_wait import exposed_ms
from trainables.metrics.phases import PHASES
from trainables.engine.single_image_latency import Trained, single_image_latency
from trainables.rundir import headline

log = logging.getLogger("raydistill")


def run(job: Job) -> dict[str, float]:
    """Train to the configured end, from wherever the job stands. Returns the summary, on every rank.

    Raises:
        TrainingError: a loss or a parameter that is not finite, or replicas that disagree.
        DataError, CheckpointError: see their own modules.
    """
    config, progress = job.config, job.checkpoint_state.progress
    job.clock.begin()
    job.report(
        "start",
        progress.step,
        progress.epoch,
        {
            "steps_per_epoch": job.train_loader.steps_per_epoch,
            "samples_per_epoch": job.train_loader.samples_per_epoch,
            "epochs": num_epochs(job),
            "num_workers": job.group.world_size,
            "max_steps": config.train.warmup_steps + config.train.max_steps if config.train.max_steps else 0,
        },
    )
    if progress.epoch_record:  # its checkpoint stands: a death may have come before its record did
        job.report("epoch", **progress.epoch_record)
    if config.train.max_steps is not None:
        return run_timing(job)
    if job.train_state.noise is None and job.group.is_main:
        several = "losses have optimizers of their own"
        why = several if job.train_state.updates.several else "one worker compares micro-batches, and optim.accumulate is 1"
        log.info("%s: no noise_scale: %s", config.stage, why)
    while progress.epoch < num_epochs(job) and not progress.reached and not is_time_up(job):
        with job.clock.part("train"):
            train_epoch(job)
        finish_epoch(job)
    return summarize(job)


def num_epochs(job: Job) -> int:
    """Epochs in all, with those of an init stage."""
    return job.train_state.init_epochs + job.config.optim.epochs


def is_time_up(job: Job) -> bool:
    """Whether the time for the training is up before its last epoch; the same on every rank."""
    until_s = job.config.train.until_s
    # Each rank has a clock of its own: rank 0 decides.
    return until_s is not None and bool(gather_objects(job.clock.train_s >= until_s, job.group)[0])


def is_evaluated(job: Job, epoch: int) -> bool:
    """Whether a job is evaluated after `epoch` epochs: after every so many of its training, and always after the last one."""
    due = (epoch - job.train_state.init_epochs) % job.config.train.evaluate_every == 0
    return due or epoch == num_epochs(job) or is_time_up(job)


def run_timing(job: Job) -> dict[str, float]:
    """Warm up, run `max_steps` steps or fewer if they are enough, and stop: throughput and phase times, no evaluation."""
    last = job.config.train.warmup_steps + (job.config.train.max_steps or 0)
    skipped, ended = 0, False
    while not ended:
        with job.clock.part("train"):
            ended = train_epoch(job, stop_at=last)
        skipped = max(skipped, len(note_skipped(job, job.train_loader, {})))
        job.checkpoint_state.progress.epoch += 1
        job.checkpoint_state.progress.position = 0
    return summarize(job, skipped)


def train_epoch(job: Job, stop_at: int | None = None) -> bool:
    """The rest of the current epoch; of a timing run, up to the step `stop_at` or to where that is enough: True there."""
    config, progress, train_state, timer = job.config, job.checkpoint_state.progress, job.train_state, job.timer
    steps_per_epoch = job.train_loader.steps_per_epoch
    init_steps = train_state.init_epochs * steps_per_epoch
    train_state.ddp_module.train()
    train_state.distillation_module.begin_stage(progress.epoch - train_state.init_epochs)
    if not progress.position:
        begin_epoch(job)
    loader = job.train_loader
    batches, drawn = loader.epoch(progress.epoch, progress.position), loader.augmentation_epoch(progress.epoch)
    if train_state.teacher is not None and train_state.distillation_module.requires_teacher(
        progress.epoch - train_state.init_epochs
    ):
        batches = train_state.teacher.prefetch(batches, drawn)
    ready = on_device(batches, job.group.device, drawn, loader.costs.add_copy)
    job.throughput.begin(progress.step)
    start_step(job)
    try:
        for batch in ready:
            timer.mark("data")
            if progress.step == job.memory_from:
                reset_memory_peak(job.group.device)
            train_state.updates.set_learning_rates(progress.step - init_steps, steps_per_epoch, config.data.global_batch_size)
            with one_sample_explained(job):
                train_step(train_state, batch, progress.step, timer)
            timer.stop()
            job.host.stop()
            job.waits.note()
            progress.step += 1
            if progress.step == job.throughput.warmup_until:
                job.train_loader.costs.clear()
            progress.position = batch.position
            in_epoch = -(-progress.position // config.data.global_batch_size)
            ended = progress.step == stop_at
            done = ended or in_epoch == steps_per_epoch
            if done or in_epoch % config.train.log_every == 0 or progress.step == config.train.warmup_steps:
                log_step(job, in_epoch)
                if stop_at is not None and not ended and job.enough is not None:
                    with job.clock.part("other"):
                        ended = is_enough(job, job.enough)
                    job.throughput.begin(progress.step)  # the question is no part of a step
            if done or ended:
                return ended
            if in_epoch % config.train.checkpoint_every == 0 and stop_at is None:
                save_inside_epoch(job, in_epoch)
            start_step(job)
    finally:
        ready.close()
    return False


def start_step(job: Job) -> None:
    """The clocks of a step begin."""
    job.timer.start()
    job.host.start()


def reset_memory_peak(device: torch.device) -> None:
    """Forget the most memory so far: cuDNN's search for the fastest kernels took some that no later step does."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what the search has left would count as reserved
        torch.cuda.reset_peak_memory_stats(device)


def memory_peak(device: torch.device) -> tuple[int, int]:
    """The most bytes in tensors, and the most that torch's allocator has reserved."""
    return torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)


def begin_epoch(job: Job) -> None:
    """Before an epoch's first step. After an init stage the optimizer begins anew, and so does what was best."""
    train_state, progress = job.train_state, job.checkpoint_state.progress
    if train_state.init_epochs and progress.epoch == train_state.init_epochs:
        for optimizer in job.checkpoint_state.optimizers:
            optimizer.state.clear()
        progress.best_top1_pct, progress.best_epoch = -1.0, -1
    train_state.distillation_module.begin_epoch(progress.epoch - train_state.init_epochs)


def is_enough(job: Job, enough: Callable[[Sequence[float]], bool]) -> bool:
    """Whether a timing run may end before its last step: `enough` says so on the main rank, for all."""
    return bool(gather_objects(job.group.is_main and enough(job.timer.steps_s()), job.group)[0])


@contextlib.contextmanager
def one_sample_explained(job: Job) -> Iterator[None]:
    """Batch norm normalises over a channel's values: with one image and 1×1 maps there is one value, which torch refuses."""
    try:
        yield
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        raise TrainingError(
            f"{job.config.stage}: a worker's part of a batch came down to one image, which the batch norm of "
            f"{job.config.model} cannot normalise: set data.last_batch=drop, another data.global_batch_size or optim.accumulate"
        ) from error


def log_step(job: Job, in_epoch: int) -> None:
    """The one place that waits for the device: read the sums of all ranks, stop at a loss that is not finite, say a line."""
    train_state, progress, group = job.train_state, job.checkpoint_state.progress, job.group
    noise = [train_state.noise.take()] if train_state.noise is not None else []
    mine = torch.cat([train_state.sums, (train_state.bad_step.double() >= 0).double().reshape(1), *noise])
    local = train_state.sums.clone()
    everything = all_reduce_sum(mine, group).tolist()
    n = len(train_state.names)
    totals, bad, window = everything[:n], everything[n], everything[n + 1 :]
    train_state.sums.zero_()
    images = totals[0]
    images_per_s = job.throughput.end(images, progress.step)
    job.timer.collect()
    if bad:
        stop_not_finite(job)
    check_replicas(train_state.distillation_module, group, progress.step)
    progress.partial = [a + b for a, b in zip(progress.partial or [0.0] * n, totals, strict=True)]
    metrics = means(train_state, totals, progress.epoch) | (job.noise.add(window) if window else {})
    of_task = next(update for update in train_state.updates.updates if "task" in update.losses)
    lr = of_task.optimizer.param_groups[0]["lr"]
    phases = job.timer.take()
    metrics |= {"lr": lr, "images_per_s": images_per_s, **phases}
    job.report(
        "step",
        progress.step,
        progress.epoch + in_epoch / job.train_loader.steps_per_epoch,
        {f"train/{name}": value for name, value in metrics.items()},
    )
    if group.is_main:
        now, epoch = (means(train_state, sums, progress.epoch) for sums in (local.tolist(), progress.partial))
        log.info(
            "Epoch: [%d][%d/%d]  Time %.3f  Data %.3f  Loss %.4f (%.4f)  Acc@1 %.2f (%.2f)  Acc@5 %.2f (%.2f)  lr %.4g"
            "  %.1f images/s",
            progress.epoch + 1,
            in_epoch,
            job.train_loader.steps_per_epoch,
            phases.get("phase/step_ms", math.nan) / 1e3,
            phases.get("phase/data_ms", math.nan) / 1e3,
            now["loss"],
            epoch["loss"],
            now["top1_pct"],
            epoch["top1_pct"],
            now["top5_pct"],
            epoch["top5_pct"],
            lr,
            images_per_s,
        )


def means(train_state: TrainState, sums: Sequence[float], epoch: int) -> dict[str, float]:
    """Sums over images of an epoch, see `TrainState.names`, as named means; accuracies in percent. No image: nan.

    A term that no method computes in this epoch is left out.
    """
    silent = train_state.silent(epoch)
    named = {name: sum_ for name, sum_ in zip(train_state.names, sums, strict=True) if name not in silent}
    n = named.pop("images") or math.nan
    return {
        f"{name}_pct" if (hits := name in ("top1", "top5")) else name: (100 if hits else 1) * sum_ / n
        for name, sum_ in named.items()
    }


def stop_not_finite(job: Job) -> None:
    steps = [step for step in gather_objects(int(job.train_state.bad_step), job.group) if step >= 0]
    raise TrainingError(
        f"{job.config.stage}: the loss is not finite at step {min(steps) + 1}: lower optim.lr (now {job.config.optim.lr:g}), set "
        f"optim.clip_grad_norm, or use precision bf16 or fp32; {last_good(job)}"
    )


def last_good(job: Job) -> str:
    """Which state is left, for an error's line."""
    return f"the last good state is {job.stage.last}" if job.stage.last.exists() else "no checkpoint had been written yet"


def check_finite(job: Job) -> None:
    """Before anything is saved: an update that spoiled the parameters, or a batch norm's statistics, may follow a finite loss.

    Raises:
        TrainingError: on every rank.
    """
    total = torch.zeros((), dtype=torch.float64, device=job.group.device)
    for tensor in (*job.train_state.distillation_module.parameters(), *job.train_state.distillation_module.buffers()):
        if tensor.is_floating_point():
            total += tensor.detach().double().abs().sum()
    if not math.isfinite(float(all_reduce_sum(total, job.group))):  # statistics differ by rank
        raise TrainingError(
            f"{job.config.stage}: a parameter or a batch norm's statistic is not finite after step {job.checkpoint_state.progress.step}: "
            f"lower optim.lr (now {job.config.optim.lr:g}) or set optim.clip_grad_norm; {last_good(job)}"
        )


def save_inside_epoch(job: Job, in_epoch: int) -> None:
    """A checkpoint at a position inside the epoch; training goes on in the same loader."""
    if in_epoch % job.config.train.log_every:
        log_step(job, in_epoch)  # the sums belong to the state: they are read before it is saved
    progress = job.checkpoint_state.progress
    with job.clock.part("checkpoint"):
        check_finite(job)
        progress.skipped = note_skipped(job, job.train_loader, progress.skipped)
        job.flush_records()
        checkpoint.save(job.stage.last, job.checkpoint_state, job.group)
    job.throughput.begin(job.checkpoint_state.progress.step)


def finish_epoch(job: Job) -> None:
    """Evaluate where it is due, check, save last and best, and report: the epoch counts once its checkpoint stands."""
    config, group, progress = job.config, job.group, job.checkpoint_state.progress
    check_finite(job)
    skipped = len(note_skipped(job, job.train_loader, progress.skipped))
    trained = means(job.train_state, progress.partial, progress.epoch) | job.noise.end_epoch() | teacher_images(job)
    used = job.telemetry()  # of the training alone: the evaluation loads a node otherwise
    if not progress.partial[0]:
        raise DataError(f"{config.data.path}: not one training image could be read")
    progress.epoch, progress.position = progress.epoch + 1, 0
    progress.partial, progress.skipped = [], {}
    # Of the training alone: an evaluation has shapes of its own, and cuDNN searches for them too.
    if group.device.type == "cuda" and job.memory_peak is None and progress.step > job.memory_from:
        job.memory_peak = memory_peak(group.device)
    val = evaluate_epoch(job) if is_evaluated(job, progress.epoch) else {}
    if val:
        skipped += len(note_skipped(job, job.val_loader, {}))
    best = bool(val) and val["top1_pct"] > progress.best_top1_pct
    if best:
        progress.best_top1_pct, progress.best_epoch = val["top1_pct"], progress.epoch
    target = config.train.until_top1_pct
    if val and target is not None and val["top1_pct"] >= target:
        progress.reached = {"time_to_accuracy_s": job.clock.train_s, "steps_to_accuracy": float(progress.step)}
    learned = {f"val/{name}": value for name, value in val.items()}
    learned |= {f"epoch/train/{name}": value for name, value in trained.items()} | {"epoch/skipped_images": float(skipped)}
    measured = {
        **throughput(job),
        "training_epoch": float(progress.epoch - job.train_state.init_epochs),
        **progress.reached,
        **used,
    }
    learned |= epoch_clock(job)
    row = {"epoch": progress.epoch, "step": progress.step, **learned}
    record = learned | {f"epoch/{name}": value for name, value in measured.items()}
    progress.history.append(row)
    progress.epoch_record = {"step": progress.step, "epoch": float(progress.epoch), "metrics": record}
    with job.clock.part("checkpoint"):
        job.flush_records()
        if best:
            checkpoint.save(job.stage.best, job.checkpoint_state, group)
        checkpoint.save(job.stage.last, job.checkpoint_state, group)
    if group.is_main:
        log_epoch(job, val, best)
    for name, seconds in epoch_clock(job).items():  # what a checkpoint cannot know of itself
        row[name] += seconds
        record[name] += seconds
    job.report("epoch", **progress.epoch_record)


def epoch_clock(job: Job) -> dict[str, float]:
    """Seconds since the epoch began, or since this was last asked for, under the names of its record."""
    return {f"epoch/{name}": seconds for name, seconds in job.clock.end_epoch().items()}


def evaluate_epoch(job: Job) -> dict[str, float]:
    """See `evaluate`.

    Raises:
        DataError: not one validation image could be read.
    """
    with job.clock.part("eval"):
        val = evaluate(job.student, job.val_loader.epoch(0), job.normalize, job.group, job.train_state.autocast)
    if not val["num_images"]:
        raise DataError(f"{job.config.data.path}: not one validation image could be read")
    return val


def log_epoch(job: Job, val: dict[str, float], best: bool) -> None:
    """An epoch's line in the log."""
    progress, config = job.checkpoint_state.progress, job.config
    result = "not evaluated"
    if val:
        result = (
            f"val Acc@1 {val['top1_pct']:.2f}  Acc@5 {val['top5_pct']:.2f}  loss {val['loss']:.4f}  "
            f"({val['num_images']:.0f} images, {progress.history[-1]['epoch/eval_s']:.1f} s)"
        )
    log.info("%s epoch %d/%d: %s%s", config.stage, progress.epoch, num_epochs(job), result, "  best" if best else "")
    if progress.reached:
        log.info(
            "%s: %g%% reached after %.1f s of training and %d steps",
            config.stage,
            config.train.until_top1_pct,
            progress.reached["time_to_accuracy_s"],
            progress.step,
        )


def teacher_images(job: Job) -> dict[str, float]:
    """Images of the epoch for which the teacher ran all the same: they were in no cache, or no other student had asked a service.

    None of either: nothing is told. Every rank calls it.
    """
    if job.train_state.teacher is None:
        return {}
    ran_for = [count for count in gather_objects(job.train_state.teacher.end_epoch(), job.group) if count is not None]
    return {"teacher_images": float(sum(ran_for))} if ran_for else {}


def note_skipped(job: Job, loader: Loader, before: dict[int, str]) -> dict[int, str]:
    """The images of one split that any rank could not read in this epoch, those known `before` too; rank 0 names new ones.

    See `Loader.skipped`.

    Raises:
        DataError: on every rank, where all ranks together met more of them than `data.max_bad` allows.
    """
    all_gather = gather_objects(loader.skipped, job.group)
    skipped = before | {index: image for part in all_gather for index, image in part.items()}
    for index in sorted(skipped.keys() - before.keys()):
        if job.group.is_main and (loader, index) not in job.named:
            log.warning("skipped %s", skipped[index])
    job.named |= {(loader, index) for index in skipped}
    loader.refuse_too_many(skipped)
    return skipped


def throughput(job: Job) -> dict[str, float]:
    """Steady-state speed and the epoch time it gives; `epoch_projected` is 1 where no whole steady epoch was run."""
    speed = job.throughput.summary()
    if not speed:
        return {}
    steps = job.train_loader.steps_per_epoch
    epoch_s = speed["step_s"] * steps
    projected = float(speed["steady_steps"] < steps)
    return {**speed, "epoch_s": epoch_s, "gpu_s_per_epoch": job.group.world_size * epoch_s, "epoch_projected": projected}


def phases(job: Job) -> dict[str, float]:
    """Phase times over all ranks: means of means (and of quantiles), the least and the most of any; what loading costs.

    With several ranks each one's means too, as `rank0/data_ms`, …: one that is slow shows as the others' `backward`, where
    they wait for its gradients (`rank0/allreduce_wait_ms`). What the all-reduce itself costs is `phase/allreduce_ms`.
    `rank0/loader_batch_ms` and `rank0/loader_wait_ms` are its loader's.
    """
    times = job.timer.summary()
    every = gather_objects(
        {**times, **job.host.summary(), **job.waits.summary(), **job.train_loader.costs.summary()} if times else {}, job.group
    )
    ranks = [mine for mine in every if mine]
    whole = {}
    for name in dict.fromkeys(name for mine in ranks for name in mine):
        values = [mine[name] for mine in ranks if name in mine]
        whole[name] = min(values) if "_min_" in name else max(values) if "_max_" in name else sum(values) / len(values)
    if (waits_ms := exposed_ms(gather_objects(job.waits.by_step, job.group))) is not None:
        whole["phase/allreduce_ms"] = waits_ms
    if len(ranks) > 1:
        own = {
            f"phase/{p}_ms": f"{p}_ms" for p in (*PHASES, "step", "cpu", "core_wait", "allreduce_wait", "allreduce_wait_error")
        }
        own |= {"loader/batch_ms": "loader_batch_ms", "loader/wait_ms": "loader_wait_ms"}
        whole |= {f"rank{r}/{name}": mine[key] for r, mine in enumerate(ranks) for key, name in own.items() if key in mine}
    return whole


def memory(job: Job) -> dict[str, float]:
    """MiB of the GPUs' memory. Of training after the warm-up, of the rank that had most: `peak_memory_mib` in tensors, and
    `reserved_memory_mib` with what torch's allocator held besides. `free_memory_mib` is what nobody uses now, and
    `gpu_memory_mib` what a GPU has, each of the GPU with the least.
    """
    device = job.group.device
    free, total = torch.cuda.mem_get_info(device)
    mine = (*(job.memory_peak or memory_peak(device)), free, total)
    peaks, reserved, frees, totals = zip(*gather_objects(mine, job.group), strict=True)
    found = {
        "peak_memory_mib": max(peaks),
        "reserved_memory_mib": max(reserved),
        "free_memory_mib": min(frees),
        "gpu_memory_mib": min(totals),
    }
    return {name: size / 2**20 for name, size in found.items()}


def trained(job: Job, step_ms: float) -> Trained:
    """What the training has shown of its micro-batches; `step_ms`: its mean step."""
    accumulate = job.config.optim.accumulate
    parts = job.group.world_size * accumulate
    peak_bytes = (job.memory_peak or memory_peak(job.group.device))[0] if job.group.device.type == "cuda" else 0
    return Trained(
        micro_batch=max(1, job.config.data.global_batch_size // parts),
        took_s=step_ms / accumulate / 1e3,
        most_images=job.train_loader.samples_per_epoch // parts,
        peak_bytes=peak_bytes,
    )


def summarize(job: Job, skipped_images: int = 0) -> dict[str, float]:
    """The numbers of the whole job, reported once and returned. `skipped_images`: the most that any epoch could not read."""
    progress = job.checkpoint_state.progress
    summary = {**throughput(job), **phases(job), **job.telemetry(whole=True), **job.noise.whole(), "steps": float(progress.step)}
    summary["skipped_images"] = max([float(skipped_images), *(row["epoch/skipped_images"] for row in progress.history)])
    if job.group.device.type == "cuda":
        summary |= memory(job)
    # A probe that ends when it knows enough must be short; torch.compile would compile anew for other batches.
    if job.enough is None and not job.config.train.compile:
        summary |= single_image_latency(
            job.train_state, job.config.data.image_size, trained(job, summary.get("phase/step_ms", math.inf))
        )
    evaluated = [row for row in progress.history if "val/top1_pct" in row]
    if evaluated:
        summary |= {
            **headline(evaluated[-1]),
            "best_top1_pct": progress.best_top1_pct,
            "best_epoch": float(progress.best_epoch),
            **progress.reached,
        }
    summary |= job.clock.total()
    if walls_s := [row["epoch/wall_s"] for row in progress.history]:  # caches and the first kernels are made in the first epoch
        summary["epoch_wall_s"] = fmean(walls_s[1:] or walls_s)
    job.report("summary", progress.step, float(progress.epoch), summary)
    return summary
