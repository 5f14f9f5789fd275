"""One training step: with a teacher it distils, without one it trains on labels alone. Nothing here waits for the GPU.

Shapes: B batch of this rank, C channels, H W pixels, K classes. Losses are per sample, (B,), until the last line that needs
them, so that a gradient weighs samples, not ranks or micro-batches.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainables.config import DistillConfig
from trainables.device.augment import Inputs
from trainables.device.feed import DeviceBatch
from trainables.device.mixing import Mix
from trainables.distributed import GlobalCount, Group
from trainables.evaluate import correct_counts
from trainables.methods import METHODS
from trainables.methods.kd import soft_loss
from trainables.models.registry import logits_and_aux
from trainables.noise_scale import GradientNoise, num_parts

SUMS = ("images", "loss", "task_loss", "soft_loss", "method_loss", "top1", "top5")


class Marks(Protocol):
    """What the step asks of a timer: close the phase that ran since the last mark."""

    def mark(self, phase: str) -> None: ...


@dataclass
class Learner:
    """What one step needs. `student` is the DDP wrapper where there are several ranks."""

    student: nn.Module
    teacher: nn.Module | None
    distill: DistillConfig | None
    """None: the labels alone are learned."""
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    group: Group
    prepare: Callable[[DeviceBatch], Inputs]
    autocast: Callable[[], contextlib.AbstractContextManager[None]]
    sums: Tensor
    """Sums since the last log line, (len(SUMS),) float64 on the device."""
    bad_step: Tensor
    """The first step whose loss was not finite, or -1 (scalar, int64 on the device)."""
    accumulate: int = 1
    clip_grad_norm: float | None = None
    noise: GradientNoise | None = None


def student_forward(student: nn.Module, images_BCHW: Tensor) -> tuple[Tensor, tuple[tuple[float, Tensor], ...]]:
    """Logits (B, K) and weighted auxiliary logits, through DDP: calling its `.module` would leave gradients unsynchronised."""
    return logits_and_aux(student(images_BCHW))


@torch.inference_mode()
def teacher_forward(teacher: nn.Module, images_BCHW: Tensor) -> Tensor:
    """The frozen teacher's logits (B, K)."""
    return logits_and_aux(teacher(images_BCHW))[0]


def losses(
    student_BK: Tensor,
    aux: tuple[tuple[float, Tensor], ...],
    teacher_BK: Tensor | None,
    labels_B: Tensor,
    distill: DistillConfig | None,
    mix: Mix | None = None,
) -> dict[str, Tensor]:
    """Named per-sample terms (B,): loss = task_weight·CE + soft_weight·T²·KL(teacher‖student) + method_weight·other.

    The CE of mixed images is share·CE(own label) + (1 - share)·CE(the other's); all other terms see the image as it is.
    The CE of auxiliary heads (Inception) belongs to the task. A term with weight 0 is not computed, and
    `teacher_BK` may be None where no term needs it. Without `distill` the loss is the CE alone.
    """
    # bf16 and fp16 logits are reduced in fp32: a sum over K of half-precision exponentials is not exact enough.
    student_BK = student_BK if student_BK.dtype == torch.float64 else student_BK.float()
    task = cross_entropy(student_BK, labels_B, mix)
    for weight, aux_BK in aux:
        task = task + weight * cross_entropy(aux_BK.to(student_BK.dtype), labels_B, mix)
    if distill is None:
        return {"loss": task, "task_loss": task}
    terms = {"task_loss": task}
    weighted = [distill.task_weight * task]
    if teacher_BK is not None and distill.soft_weight:
        terms["soft_loss"] = soft_loss(student_BK, teacher_BK, distill.temperature)
        weighted.append(distill.soft_weight * terms["soft_loss"])
    if teacher_BK is not None and distill.method_weight:
        own = METHODS[distill.method].terms(student_BK, teacher_BK, labels_B, distill.temperature)
        terms["method_loss"] = torch.stack(list(own.values())).sum(0)
        weighted.append(distill.method_weight * terms["method_loss"])
    return {"loss": torch.stack(weighted).sum(0) if len(weighted) > 1 else weighted[0], **terms}


def cross_entropy(logits_BK: Tensor, labels_B: Tensor, mix: Mix | None) -> Tensor:
    """Cross-entropy of each sample (B,), with the labels of both images where two are mixed."""
    own_B = F.cross_entropy(logits_BK, labels_B, reduction="none")
    if mix is None:
        return own_B
    share_B = mix.share_B.to(own_B.dtype)
    return share_B * own_B + (1 - share_B) * F.cross_entropy(logits_BK, mix.labels_B, reduction="none")


def micro_batches(inputs: Inputs, accumulate: int) -> list[tuple[Inputs, bool]]:
    """The batch in at most `accumulate` parts, each (inputs, real).

    A rank without samples still has to take part in DDP's all-reduce: it runs two blank images that weigh nothing (two,
    since batch norm refuses one; its statistics are overwritten by rank 0's, which always holds the larger share).
    """
    images_BCHW, labels_B, mix = inputs
    if len(labels_B) == 0:
        return [(Inputs(images_BCHW.new_zeros((2, *images_BCHW.shape[1:])), labels_B.new_zeros(2)), False)]
    parts = min(accumulate, len(labels_B))
    mixes = [None] * parts if mix is None else [Mix(*part) for part in zip(*(t.tensor_split(parts) for t in mix), strict=True)]
    split = zip(images_BCHW.tensor_split(parts), labels_B.tensor_split(parts), mixes, strict=True)
    return [(Inputs(*part), True) for part in split]


def train_step(learner: Learner, batch: DeviceBatch, step: int, timer: Marks) -> None:
    """Forward, loss, backward, update; adds to `learner.sums`."""
    student, group = learner.student, learner.group
    num_images = len(batch.labels_B)
    count = GlobalCount(num_images, group, parts=num_parts(num_images, group, learner.accumulate))
    batch.wait()
    timer.mark("h2d")
    parts = micro_batches(learner.prepare(batch), learner.accumulate)
    timer.mark("augment")
    for number, ((part_BCHW, part_B, mix), real) in enumerate(parts, start=1):
        with learner.autocast():
            teacher_BK = teacher_forward(learner.teacher, part_BCHW).clone() if learner.teacher is not None else None
        timer.mark("teacher")
        last = number == len(parts)
        with student.no_sync() if isinstance(student, DistributedDataParallel) and not last else contextlib.nullcontext():
            with learner.autocast():
                student_BK, aux = student_forward(student, part_BCHW)
            terms = losses(student_BK, aux, teacher_BK, part_B, learner.distill, mix)
            timer.mark("student")  # before the count, which waits for ranks that have not begun their step
            total = terms["loss"].sum() * count.weight().to(terms["loss"].dtype) * float(real)
            learner.scaler.scale(total).backward()
        if learner.noise is not None:
            learner.noise.end_part(len(part_B) if real else 0)
        timer.mark("backward")
        if real:
            add_sums(learner, student_BK, part_B, terms, step)
    if learner.noise is not None:
        learner.noise.end_step(count, learner.scaler)
    if learner.clip_grad_norm is not None:
        learner.scaler.unscale_(learner.optimizer)
        nn.utils.clip_grad_norm_(student.parameters(), learner.clip_grad_norm)
    learner.scaler.step(learner.optimizer)
    learner.scaler.update()
    learner.optimizer.zero_grad(set_to_none=True)
    timer.mark("optimizer")


@torch.no_grad()
def add_sums(learner: Learner, student_BK: Tensor, labels_B: Tensor, terms: dict[str, Tensor], step: int) -> None:
    """Add this part's losses and hits to the running sums and note the first loss that is not finite, on the device."""
    first, first_five = correct_counts(student_BK, labels_B)
    named = {name: term.sum() for name, term in terms.items()}
    values = {"images": torch.full_like(first, len(labels_B)), "top1": first, "top5": first_five, **named}
    zero = learner.sums.new_zeros(())
    learner.sums += torch.stack([values[name].double() if name in values else zero for name in SUMS])
    broken = ~torch.isfinite(named["loss"]) & (learner.bad_step < 0)
    learner.bad_step.masked_fill_(broken, step)
