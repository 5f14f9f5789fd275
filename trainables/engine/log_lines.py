"""The log lines of training: means over the steps since the previous line, over all ranks.

Nothing here waits for a GPU. The numbers of a line travel to the host while the next steps run, and are read when the next line
begins. On a CPU they are read at once.
"""

import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from trainables.distributed.group import all_reduce_sum, check_replicas, replica_checksums
from trainables.engine.checks import raise_not_finite
from trainables.engine.job import Job, PendingLine
from trainables.engine.passes import TrainState
from trainables.engine.records import means
from trainables.engine.step_sums import NEVER
from trainables.metrics.phase_timer import data_pct, named

log = logging.getLogger("raydistill")


def log_step(job: Job, step_in_epoch: int) -> None:
    """Write the pending line and begin the next one; on a CPU, write that one too. Every rank must call this.

    Raises TrainingError: see `write_log_line`.
    """
    write_log_line(job)
    train_state, metrics = job.train_state, job.metrics
    job.log_line = PendingLine(
        job.progress.step,
        step_in_epoch,
        _learning_rate(train_state),
        metrics.throughput.end(job.progress.step),
        metrics.timer.end_window(),
        _to_host(_take_totals(job), replica_checksums(train_state.distillation_module, job.group)),
    )
    if not job.writes_log_late:
        write_log_line(job)


def write_log_line(job: Job) -> None:
    """Check, report and log the pending line, if any. On a GPU this waits for the line's last step. Every rank must call it.

    Raises TrainingError: on every rank, if a loss is not finite or replicas disagree.
    """
    if job.log_line is None:
        return
    line, job.log_line = job.log_line, None
    train_state, progress, metrics = job.train_state, job.progress, job.metrics
    numbers, checksums_R = line.sums()
    num_sums = len(train_state.sums.names)
    totals, num_bad, noise_sums = numbers[:num_sums], numbers[num_sums], numbers[num_sums + 1 :]
    images_per_s = metrics.throughput.add(line.window, totals[0])
    metrics.collect()
    if num_bad:
        raise_not_finite(job)
    if job.config.omitted != "allreduce":
        check_replicas(checksums_R, line.step, job.config.scale.pipeline_stages)
    progress.partial = [old + new for old, new in zip(progress.partial or [0.0] * len(totals), totals, strict=True)]
    phases = line.phases.statistics()
    now = means(train_state, totals)
    values = {
        **now,
        **(metrics.noise.add(noise_sums) if noise_sums else {}),
        "lr": line.lr,
        "images_per_s": images_per_s,
        "num_workers": job.group.world_size,
        **named(phases),
        **data_pct(phases),
    }
    passed = progress.epoch + line.step_in_epoch / job.epochs.steps_per_epoch
    job.report("step", line.step, passed, {f"train/{name}": value for name, value in values.items()})
    if job.group.is_main:
        _log_line(job, line, now, values)


def _take_totals(job: Job) -> Tensor:
    """Take and reset the sums, the number of ranks with a non-finite loss, and the noise sums: float64, over all ranks."""
    train_state = job.train_state
    parts = [train_state.sums.values_N, (train_state.sums.bad_step < NEVER).double().reshape(1)]
    if train_state.update.noise is not None:
        parts.append(train_state.update.noise.take())
    train_state.sums.clear()
    return all_reduce_sum(torch.cat(parts), job.group)


def _to_host(*tensors: Tensor) -> Callable[[], list[list[Any]]]:
    """Begin to copy tensors to the host. Return a function that waits for the copies and returns their values."""
    copies = [tensor.to("cpu", non_blocking=True) for tensor in tensors]
    copied = torch.cuda.Event() if tensors[0].is_cuda else None
    if copied is not None:
        copied.record(torch.cuda.current_stream(tensors[0].device))

    def values() -> list[list[Any]]:
        if copied is not None:
            copied.synchronize()  # type: ignore[no-untyped-call]
        return [copy.tolist() for copy in copies]

    return values


def _learning_rate(train_state: TrainState) -> float:
    """Return the rate of the optimizer for the task loss; an init stage has only one optimizer."""
    task_optimizer = max(train_state.optimizers, key=lambda each: "task" in each.losses)
    return float(task_optimizer.optimizer.param_groups[0]["lr"])


def _log_line(job: Job, line: PendingLine, now: Mapping[str, float], reported: Mapping[str, float]) -> None:
    """Log a line. `now` holds the means since the last line, `reported` the step's record."""
    in_epoch = means(job.train_state, job.progress.partial)
    shown = {"loss": "Loss %.4f (%.4f)", "top1_pct": "Acc@1 %.2f (%.2f)", "top5_pct": "Acc@5 %.2f (%.2f)"}
    learned = "  ".join(text % (now[name], in_epoch[name]) for name, text in shown.items() if name in now)
    log.info(
        "Epoch: [%d][%d/%d]  Time %.3f  Data %.3f  %s  lr %.4g  %.1f images/s",
        job.progress.epoch + 1,
        line.step_in_epoch,
        job.epochs.steps_per_epoch,
        reported.get("phase/step_ms", math.nan) / 1e3,
        reported.get("phase/data_ms", math.nan) / 1e3,
        learned,
        line.lr,
        reported["images_per_s"],
    )
