"""The numbers that a training reports: of a log line, of an epoch, and of the whole stage.

Names: `train/…` at a log line, `val/…` and `epoch/…` at an epoch's end, plain in the summary; see `metrics_file`.
"""

import logging
import math
from collections.abc import Mapping, Sequence
from statistics import fmean

import torch

from trainables.distributed.group import Group, all_reduce_sum, check_replicas, gather_objects
from trainables.engine.checks import raise_not_finite
from trainables.engine.job import Job
from trainables.engine.pass_latency import TrainingShape, pass_latency
from trainables.engine.step import TrainState
from trainables.failures import kind_of
from trainables.metrics.allreduce_wait import exposed_ms
from trainables.metrics.phases import ALL_PHASES
from trainables.rundir import headline

log = logging.getLogger("raydistill")
ACCURACIES = ("top1", "top5")
_OF_A_STEP = ("step", "cpu", "core_wait", "allreduce_wait", "allreduce_wait_error")


def log_step(job: Job, step_in_epoch: int) -> None:
    """Read the sums of all ranks, check them, report a step, log a line. Waits for the device, which a step never does.

    Raises TrainingError: on every rank: a loss that is not finite, or replicas that disagree.
    """
    train_state, progress, metrics = job.train_state, job.progress, job.metrics
    totals, num_bad, noise_sums = _reduce_sums(job)
    images_per_s = metrics.throughput.end(totals[0], progress.step)
    metrics.timer.collect()
    metrics.allreduce_wait.sample()
    if num_bad:
        raise_not_finite(job)
    check_replicas(train_state.distillation_module, job.group, progress.step, job.config.scale.pipeline_stages)
    progress.partial = [old + new for old, new in zip(progress.partial or [0.0] * len(totals), totals, strict=True)]
    phases = metrics.timer.take()
    values = {
        **means(train_state, totals),
        **(metrics.noise.add(noise_sums) if noise_sums else {}),
        "lr": _learning_rate(train_state),
        "images_per_s": images_per_s,
        "num_workers": job.group.world_size,
        **phases,
    }
    passed = progress.epoch + step_in_epoch / job.epochs.steps_per_epoch
    job.report("step", progress.step, passed, {f"train/{name}": value for name, value in values.items()})
    if job.group.is_main:
        _log_step_line(
            job,
            step_in_epoch,
            now=means(train_state, totals),
            in_epoch=means(train_state, progress.partial),
            reported=values,
        )


def _reduce_sums(job: Job) -> tuple[list[float], float, list[float]]:
    """Over all ranks: the sums since the last log line, which are reset; how many ranks had a bad loss; the noise's sums."""
    train_state = job.train_state
    parts = [train_state.sums.values_N, (train_state.sums.bad_step >= 0).double().reshape(1)]
    if train_state.update.noise is not None:
        parts.append(train_state.update.noise.take())
    reduced = all_reduce_sum(torch.cat(parts), job.group).tolist()
    train_state.sums.clear()
    n = len(train_state.sums.names)
    return reduced[:n], reduced[n], reduced[n + 1 :]


def _learning_rate(train_state: TrainState) -> float:
    """The rate of the optimizer that minimises the task's loss; an init stage has one alone."""
    of_task = max(train_state.optimizers, key=lambda each: "task" in each.losses)
    return float(of_task.optimizer.param_groups[0]["lr"])


def _log_step_line(
    job: Job, step_in_epoch: int, *, now: Mapping[str, float], in_epoch: Mapping[str, float], reported: Mapping[str, float]
) -> None:
    """`now`: means since the last line; `in_epoch`: in the epoch; `reported`: the step's record."""
    log.info(
        "Epoch: [%d][%d/%d]  Time %.3f  Data %.3f  Loss %.4f (%.4f)  Acc@1 %.2f (%.2f)  Acc@5 %.2f (%.2f)  lr %.4g"
        "  %.1f images/s",
        job.progress.epoch + 1,
        step_in_epoch,
        job.epochs.steps_per_epoch,
        reported.get("phase/step_ms", math.nan) / 1e3,
        reported.get("phase/data_ms", math.nan) / 1e3,
        *(values[name] for name in ("loss", "top1_pct", "top5_pct") for values in (now, in_epoch)),
        reported["lr"],
        reported["images_per_s"],
    )


def means(train_state: TrainState, sums: Sequence[float]) -> dict[str, float]:
    """Sums over images of an epoch, see `TrainState.sums`, as named means; accuracies in percent. No image: nan.

    A term whose method has not begun is left out.
    """
    later = train_state.distillation_module.later_terms
    num_images, *others = zip(train_state.sums.names, sums, strict=True)
    n = num_images[1] or math.nan
    return {
        f"{name}_pct" if name in ACCURACIES else name: (100 if name in ACCURACIES else 1) * total / n
        for name, total in others
        if name not in later
    }


def epoch_seconds(job: Job) -> dict[str, float]:
    """Wall time since the epoch began, or since the last call, under the names of an epoch's record."""
    return {f"epoch/{name}": seconds for name, seconds in job.metrics.clock.end_epoch().items()}


def log_epoch(job: Job, val: dict[str, float], best: bool) -> None:
    progress, config = job.progress, job.config
    result = "not evaluated"
    if val:
        result = (
            f"val Acc@1 {val['top1_pct']:.2f}  Acc@5 {val['top5_pct']:.2f}  loss {val['loss']:.4f}  "
            f"({val['num_images']:.0f} images, {progress.history[-1]['epoch/eval_s']:.1f} s)"
        )
    log.info("%s epoch %d/%d: %s%s", config.stage, progress.epoch, job.epochs.num, result, "  best" if best else "")
    if progress.reached:
        log.info(
            "%s: %g%% reached after %.1f s of training and %d steps",
            config.stage,
            config.train.until_top1_pct,
            progress.reached["time_to_accuracy_s"],
            progress.step,
        )


def teacher_images(num_computed: int | None, group: Group) -> dict[str, float]:
    """Images of the epoch for which a teacher ran although a cache or a service may spare it: the cache had not their logits, or
    no other student had requested them. `num_computed`: this rank's; {} where all are None. Every rank calls it.
    """
    counts = [count for count in gather_objects(num_computed, group) if count is not None]
    return {"teacher_images": float(sum(counts))} if counts else {}


def throughput(job: Job) -> dict[str, float]:
    """Steady-state speed and the epoch time it gives; `epoch_projected` is 1 where no whole steady epoch was run."""
    speed = job.metrics.throughput.summary()
    speed |= {f"workers{size}/images_per_s": sums[0] / sums[1] for size, sums in _speeds_by_size(job).items()}
    if "step_s" not in speed:
        return speed
    steps = job.epochs.steps_per_epoch
    epoch_s = speed["step_s"] * steps
    projected = float(speed["steady_steps"] < steps)
    return {**speed, "epoch_s": epoch_s, "gpu_s_per_epoch": job.group.world_size * epoch_s, "epoch_projected": projected}


def _speeds_by_size(job: Job) -> dict[str, list[float]]:
    """Where the job has had several world sizes, the steady state's sums (`Progress.warm`) of each in which it was reached."""
    progress = job.progress
    by_size = {**progress.other_sizes, str(job.group.world_size): progress.warm} if progress.other_sizes else {}
    return {size: by_size[size] for size in sorted(by_size, key=int) if by_size[size][1]}


def phase_times(job: Job) -> dict[str, float]:
    """Phase times over all ranks: means of means (and of quantiles), the least and the most of any; what loading costs.

    With several ranks each one's means too, as `rank0/data_ms`, …: one that is slow shows as the others' `backward`, where
    they wait for its gradients (`rank0/allreduce_wait_ms`). What the all-reduce itself costs is `phase/allreduce_ms`.
    `rank0/loader_batch_ms` and `rank0/loader_wait_ms` are its loader's.
    """
    metrics, times = job.metrics, job.metrics.timer.summary()
    if times:
        times |= metrics.host.summary() | metrics.allreduce_wait.summary() | job.train_loader.costs.summary()
    ranks = [of_rank for of_rank in gather_objects(times, job.group) if of_rank]
    found = {}
    for name in dict.fromkeys(name for of_rank in ranks for name in of_rank):
        values = [of_rank[name] for of_rank in ranks if name in of_rank]
        found[name] = min(values) if "_min_" in name else max(values) if "_max_" in name else sum(values) / len(values)
    allreduce_ms = exposed_ms(gather_objects(metrics.allreduce_wait.by_step, job.group))
    if allreduce_ms is not None:
        found["phase/allreduce_ms"] = allreduce_ms
    if len(ranks) > 1:
        names = {f"phase/{p}_ms": f"{p}_ms" for p in (*ALL_PHASES, *_OF_A_STEP)}
        names |= {"loader/batch_ms": "loader_batch_ms", "loader/wait_ms": "loader_wait_ms"}
        for rank, of_rank in enumerate(ranks):
            found |= {f"rank{rank}/{short}": of_rank[name] for name, short in names.items() if name in of_rank}
    return found


def training_shape(job: Job, step_ms: float) -> TrainingShape:
    """The micro-batches of a training whose mean step takes `step_ms`."""
    accumulate = job.config.optim.accumulate
    num_parts = job.group.world_size * accumulate
    return TrainingShape(
        micro_batch=max(1, job.config.data.global_batch_size // num_parts),
        step_s=step_ms / accumulate / 1e3,
        max_images=job.train_loader.samples_per_epoch // num_parts,
        peak_bytes=job.metrics.peak_memory.tensors_bytes(),
    )


def _passes(job: Job, shape: TrainingShape) -> dict[str, float]:
    """See `pass_latency`. {} where a method's own code fails on its images of zeros: that is no end of a finished training."""
    try:
        return pass_latency(job.train_state, job.config.data.image_size, shape)
    except Exception as error:
        if kind_of(error) == "device":
            raise
        log.warning("%s: its passes are not timed: %s: %s", job.config.stage, type(error).__name__, error)
        return {}


def summarize(job: Job, skipped_images: int = 0) -> dict[str, float]:
    """The numbers of the whole job, reported once and returned. `skipped_images`: the most that any epoch could not read."""
    progress, metrics = job.progress, job.metrics
    summary = {
        **throughput(job),
        **phase_times(job),
        **job.telemetry(whole=True),
        **metrics.noise.whole(),
        "steps": float(progress.step),
        "num_workers": float(job.group.world_size),
        "skipped_images": max([float(skipped_images), *(row["epoch/skipped_images"] for row in progress.history)]),
        **metrics.peak_memory.summary(job.group),
    }
    # A timing run that may stop early must be short; torch.compile would compile again for other batches; a pipeline stage is
    # no model; ranks time different numbers of passes, which a collective teacher would wait for; an init stage learns no label.
    times_passes = job.stop_early is None and not job.config.train.compile and job.config.scale.pipeline_stages == 1
    if times_passes and not job.train_state.teacher.is_collective and not job.config.init_stage:
        shape = training_shape(job, summary.get("phase/step_ms", math.inf))
        with metrics.clock.part("timing"):
            summary |= _passes(job, shape)
    evaluated = [row for row in progress.history if "val/top1_pct" in row]
    if evaluated:
        summary |= headline(evaluated[-1])
        summary |= {"best_top1_pct": progress.best_top1_pct, "best_epoch": float(progress.best_epoch), **progress.reached}
    for number, measured in enumerate(job.teachers, start=1):
        summary[f"teacher{number if number > 1 else ''}_top1_pct"] = measured.top1_pct
    summary |= metrics.clock.total()
    walls_s = [row["epoch/wall_s"] for row in progress.history]
    if walls_s:  # caches and the first kernels are made in the first epoch
        summary["epoch_wall_s"] = fmean(walls_s[1:] or walls_s)
    job.report("summary", progress.step, float(progress.epoch), summary)
    return summary
