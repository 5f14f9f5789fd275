"""Checks during training: non-finite losses and parameters, unreadable images."""

import logging
import math

import torch

from trainables.data.loader.loader import Loader
from trainables.distributed.group import all_reduce_sum, gather_objects
from trainables.engine.features import gather_skipped
from trainables.engine.job import Job
from trainables.engine.optim import peak_learning_rate
from trainables.errors import TrainingError

log = logging.getLogger("raydistill")


def raise_not_finite(job: Job) -> None:
    """Raise a TrainingError that names the first step with a non-finite loss on any rank. Every rank must call this."""
    step = min(gather_objects(int(job.train_state.sums.bad_step), job.group))
    raise TrainingError(f"{job.config.stage}: the loss is not finite at step {step + 1}: {_advice(job)}")


def check_finite(job: Job) -> None:
    """Check that parameters and statistics are finite before saving: an update may break them after a finite loss.

    Raises TrainingError: on every rank.
    """
    total = torch.zeros((), dtype=torch.float64, device=job.group.device)
    module = job.train_state.distillation_module
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.is_floating_point():
            total += tensor.detach().double().abs().sum()
    if not math.isfinite(float(all_reduce_sum(total, job.group))):  # statistics differ by rank
        raise TrainingError(
            f"{job.config.stage}: a parameter or a batch norm's statistic is not finite after step {job.progress.step}: "
            f"{_advice(job)}"
        )


def _advice(job: Job) -> str:
    """Suggest remedies for non-finite numbers that are not in use yet, and name the last good checkpoint."""
    optim = job.config.optim
    peak = peak_learning_rate(optim, job.config.data.global_batch_size)
    scaled = f", {peak:g} after scaling with the batch" if peak != optim.lr else ""
    changes = [f"lower optim.lr (now {optim.lr:g}{scaled})"]
    if not (optim.clip_grad_norm or optim.clip_grad_value or optim.clip_grad_agc):
        changes.append("set optim.clip_grad_norm")
    if job.config.precision == "fp16":
        changes.append("use precision bf16 or fp32")
    last = f"the last good state is {job.stage.last}" if job.stage.last.exists() else "no checkpoint has been written yet"
    return f"{' or '.join(changes)}; {last}"


def check_skipped(job: Job, loader: Loader, known: dict[int, str]) -> dict[int, str]:
    """Collect the unreadable images of this epoch over all ranks, adding to `known`; rank 0 logs new ones.

    See `Loader.skipped`. Every rank must call this.

    Raises DataError: on every rank, if all ranks together skipped more images than `data.max_bad` allows.
    """
    skipped = known | gather_skipped(loader, job.group)
    for index in sorted(skipped.keys() - known.keys()):
        if job.group.is_main and (loader, index) not in job.logged_skips:
            log.warning("skipped %s", skipped[index])
    job.logged_skips |= {(loader, index) for index in skipped}
    loader.refuse_too_many(skipped)
    return skipped
