"""The numbers that are reported for an epoch and for a whole stage.

Names are `train/…` at a log line, `val/…` and `epoch/…` after an epoch, and plain in the summary: see `metrics.report`.
"""

import contextlib
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import fmean
from typing import TypeVar

import torch

from trainables.device.tensor_format import pixels_of
from trainables.distributed.group import Group, gather_objects
from trainables.engine.job import Job
from trainables.engine.pass_latency import inference_ms, pass_latency
from trainables.engine.passes import TrainState
from trainables.engine.step_sums import LABELED
from trainables.failures import kind_of
from trainables.metrics.allreduce_wait import split_waits
from trainables.metrics.phase_timer import Statistics, StepStatistics, data_pct, named
from trainables.metrics.phases import ALL_PHASES
from trainables.rules import pipeline_micro_batches
from trainables.rundir import headline

log = logging.getLogger("raydistill")
ACCURACIES = ("top1", "top5")
_PER_RANK = {
    **{f"phase/{name}_ms": f"{name}_ms" for name in (*ALL_PHASES, "step", "cpu", "core_wait")},
    **{f"phase/{name}_ms": f"{name}_ms" for name in ("allreduce_wait", "allreduce_wait_error")},
    "loader/batch_ms": "loader_batch_ms",
    "loader/wait_ms": "loader_wait_ms",
}
"""Means that are also recorded per rank, and their short names in `rank0/…`."""
_LOG_FORMATS = {
    "top1_pct": "Acc@1 {:.2f}",
    "top5_pct": "Acc@5 {:.2f}",
    "raw_top1_pct": "top-1 without EMA {:.2f}",
    "linear_top1_pct": "linear probe {:.2f}",
    "cka": "CKA {:.4f}",
    "cosine": "cosine {:.4f}",
    "raw_cka": "CKA without EMA {:.4f}",
    "raw_cosine": "cosine without EMA {:.4f}",
    "loss": "loss {:.4f}",
}
"""How the log shows the numbers of an evaluation."""
T = TypeVar("T")


def means(train_state: TrainState, sums: Sequence[float]) -> dict[str, float]:
    """Turn sums over images, see `TrainState.sums`, into named means. Without images they are NaN.

    Accuracies are in percent of the labeled images. Terms of methods that have not started yet are left out.
    """
    later = train_state.distillation_module.inactive_terms
    totals = dict(zip(train_state.sums.names, sums, strict=True))
    num_images = totals.pop("images")
    counted = totals.pop(LABELED, num_images) or math.nan
    return {
        **{f"{name}_pct": 100 * total / counted for name, total in totals.items() if name in ACCURACIES},
        **{name: total / (num_images or math.nan) for name, total in totals.items() if name not in (*ACCURACIES, *later)},
    }


def epoch_seconds(job: Job) -> dict[str, float]:
    """Return the wall time since the epoch began, or since the last call, by its names in an epoch's record."""
    return {f"epoch/{name}": seconds for name, seconds in job.metrics.clock.end_epoch().items()}


def log_why_no_noise_scale(job: Job) -> None:
    """Log why the noise scale is not measured, if it was requested."""
    config, update = job.config, job.train_state.update
    if config.train.max_steps is None and config.measures_noise and update.noise is None and job.group.is_main:
        reason = update.noise_disabled_reason or "a single worker needs optim.accumulate of 2 or more"
        log.info("%s: noise_scale is not measured: %s", config.stage, reason)


def start_numbers(job: Job) -> dict[str, float]:
    """Return the size of a job: its epochs, steps, samples and workers."""
    config = job.config
    numbers: dict[str, float] = {
        "steps_per_epoch": job.epochs.steps_per_epoch,
        "samples_per_epoch": job.train_loader.samples_per_epoch,
        "epochs": job.epochs.num,
        "num_workers": job.group.world_size,
        "max_steps": config.train.warmup_steps + config.train.max_steps if config.train.max_steps else 0,
    }
    if config.scale.pipeline_stages > 1:
        numbers |= {"pipeline_stages": config.scale.pipeline_stages, "micro_batches": pipeline_micro_batches(config)}
    return numbers


def epoch_numbers(
    job: Job, *, trained: dict[str, float], telemetry: dict[str, float], num_skipped: int, seconds: dict[str, float]
) -> tuple[dict[str, float], dict[str, float]]:
    """Return the numbers of an epoch's training: for the history, which checkpoints store, and for its record only."""
    learned = {f"epoch/train/{name}": value for name, value in trained.items()}
    learned |= {"epoch/skipped_images": float(num_skipped), **seconds}
    return learned, {f"epoch/{name}": value for name, value in (throughput(job) | telemetry).items()}


def log_epoch(job: Job, val: dict[str, float], best: bool, eval_s: float | None) -> None:
    """Log an epoch's evaluation, which took training `eval_s`; None if it ran while training continued."""
    progress, config = job.progress, job.config
    result = "not evaluated"
    if val:
        numbers = "  ".join(text.format(val[name]) for name, text in _LOG_FORMATS.items() if name in val)
        seconds = "" if eval_s is None else f", {eval_s:.1f} s"
        result = f"val {numbers}  ({val['num_images']:.0f} images{seconds})"
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
    """Count the epoch's images that the teacher really computed, rather than a cache or another student's request.

    `num_computed` is this rank's number, or None without a cache or service; {} if all are None. Every rank must call this.
    """
    counts = [count for count in gather_objects(num_computed, group) if count is not None]
    return {"teacher_images": float(sum(counts))} if counts else {}


def throughput(job: Job) -> dict[str, float]:
    """Return the steady-state speed and the epoch time; `epoch_projected` is 1 unless a whole epoch was measured."""
    speed = job.metrics.throughput.summary()
    if "step_s" not in speed:
        return speed
    steps = job.epochs.steps_per_epoch
    epoch_s = speed["step_s"] * steps
    projected = float(speed["steady_steps"] < steps)
    return {**speed, "epoch_s": epoch_s, "gpu_s_per_epoch": job.group.world_size * epoch_s, "epoch_projected": projected}


def phase_times(job: Job) -> dict[str, float]:
    """Return phase times over all ranks: minima, maxima, and means over ranks of means and quantiles; also loader times.

    With several ranks there are also the means of each, such as `rank0/data_ms` and `rank0/loader_wait_ms`. A slow rank shows
    in the `backward` of the others, which wait for its gradients (`rank0/allreduce_wait_ms`). `phase/allreduce_ms` is the time
    of the all-reduce itself.
    """
    metrics, phases, others = job.metrics, job.metrics.timer.past_warmup.statistics(), dict[str, float]()
    if phases:
        others = data_pct(phases) | metrics.host.summary() | metrics.allreduce_wait.summary() | job.train_loader.costs.summary()
    ranks: list[tuple[StepStatistics, dict[str, float]]] = gather_objects((phases, others), job.group)
    found = named({name: Statistics.merge(each) for name, each in _by_name(phases for phases, _ in ranks).items()})
    found |= {name: fmean(each) for name, each in _by_name(others for _, others in ranks).items()}
    allreduce_ms, for_ranks_ms = split_waits(gather_objects(metrics.allreduce_wait.by_step, job.group))
    if allreduce_ms is not None:
        found["phase/allreduce_ms"] = allreduce_ms
        found |= {f"rank{rank}/waits_for_ranks_ms": wait_ms for rank, wait_ms in enumerate(for_ranks_ms)}
    if len(ranks) > 1:
        for rank, (phases, others) in enumerate(ranks):
            values = {f"phase/{name}_ms": each.mean for name, each in phases.items()} | others
            found |= {f"rank{rank}/{short}": values[name] for name, short in _PER_RANK.items() if name in values}
    return found


def _by_name(mappings: Iterable[Mapping[str, T]]) -> dict[str, list[T]]:
    """Collect the values of each name over all mappings."""
    found: dict[str, list[T]] = {}
    for mapping in mappings:
        for name, value in mapping.items():
            found.setdefault(name, []).append(value)
    return found


@contextlib.contextmanager
def _timing(job: Job, what: str) -> Iterator[None]:
    """A context for a measurement, whose exceptions must not fail a finished job unless the device is broken."""
    with job.metrics.clock.part("timing"):
        try:
            yield
        except Exception as error:
            if kind_of(error) == "device":
                raise
            log.warning("%s: cannot time %s: %s: %s", job.config.stage, what, type(error).__name__, error)


def summarize(job: Job, skipped_images: int = 0) -> dict[str, float]:
    """Report and return the numbers of the whole job. `skipped_images` is the maximum over epochs of a timing run."""
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
    # Do not time passes if a timing run may stop early and must be short, torch.compile would recompile for other batch sizes,
    # this rank has only a pipeline stage, a collective teacher would wait for ranks that time fewer passes, or labels are unused.
    config = job.config
    is_whole = config.scale.pipeline_stages == 1 and not config.init_stage
    times_passes = job.stop_early is None and not (
        config.train.compile or config.omitted or job.train_state.teacher.is_collective
    )
    if is_whole and times_passes:
        accumulate, num_parts = config.optim.accumulate, job.group.world_size * config.optim.accumulate
        with _timing(job, "the passes"):
            summary |= pass_latency(
                job.train_state,
                config.data.image_size,
                micro_batch=max(1, config.data.global_batch_size // num_parts),
                step_s=summary.get("phase/step_ms", math.inf) / accumulate / 1e3,
                max_images=job.train_loader.samples_per_epoch // num_parts,
                peak_bytes=metrics.peak_memory.tensors_bytes(),
            )
    if is_whole and config.train.max_steps is None:
        size = config.data.image_size
        blank_1CHW = torch.zeros((1, 3, size, size), dtype=torch.uint8, device=job.group.device)
        with _timing(job, "the student's forward pass"):
            summary["inference_ms"] = inference_ms(job.student, pixels_of(config)(blank_1CHW), job.train_state.autocast)
    evaluated = [row for row in progress.history if "val/num_images" in row]
    if evaluated:
        summary |= headline(evaluated[-1])
        best = next((row for row in evaluated if row["epoch"] == progress.best_epoch), {})  # empty after a change of the data
        summary |= {"best_top1_pct": best["val/top1_pct"]} if "val/top1_pct" in best else {}
        summary |= {"best_epoch": float(progress.best_epoch), **progress.reached}
    for number, measured in enumerate(job.teachers, start=1):
        if measured is not None:
            summary[f"teacher{number if number > 1 else ''}_top1_pct"] = measured.top1_pct
    summary |= metrics.clock.total()
    walls_s = [row["epoch/wall_s"] for row in progress.history]
    if walls_s:  # the first epoch fills caches and starts kernels
        summary["epoch_wall_s"] = fmean(walls_s[1:] or walls_s)
    job.report("summary", progress.step, float(progress.epoch), summary)
    return summary
