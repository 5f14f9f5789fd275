"""One training step: with a teacher it distils, without one it trains on labels alone. Nothing here waits for the GPU.

Shapes: B batch of this rank, C channels, H W pixels, K classes. Losses of samples are (B,) until the last line that needs them,
so that a gradient weighs samples, not ranks or micro-batches; a loss of the global batch is a scalar, the same on every rank.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import NamedTuple, Protocol, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainables.device.device_batches import DeviceBatch
from trainables.device.mixing import Mix
from trainables.distributed.gather import Gather
from trainables.distributed.group import GlobalCount, Group
from trainables.engine.evaluate import correct_counts
from trainables.engine.optimizers import Updates
from trainables.methods.contract import MethodBatch
from trainables.methods.distillation_module import DistillationModule, DistillationOutputs
from trainables.metrics.noise_scale import GradientNoise, num_parts
from trainables.teachers.network import TeacherInterface, TeacherRequest


class Marks(Protocol):
    """What the step asks of a timer: close the phase that ran since the last mark."""

    def mark(self, phase: str) -> None: ...


@dataclass
class TrainState:
    """What one step needs."""

    distillation_module: DistillationModule
    """The bare student with its methods."""
    student: nn.Module
    """`distillation_module`, under DDP where there are several ranks: what a step calls."""
    teacher: TeacherInterface | None
    updates: Updates
    scaler: torch.amp.GradScaler
    group: Group
    prepare: Callable[[DeviceBatch], DeviceBatch]
    autocast: Callable[[], contextlib.AbstractContextManager[None]]
    steps_per_epoch: int
    init_epochs: int = 0
    """Epochs of a warm-up stage, which come before epoch 0 of the methods."""
    blanks: int = 2
    """Images that a rank without samples runs instead."""
    accumulate: int = 1
    noise: GradientNoise | None = None
    hosts: dist.ProcessGroup | None = None
    """See `trainables.distributed.gather.hosts_group`."""
    names: tuple[str, ...] = field(init=False)
    """What `sums` adds up over images; some of it stays 0 while no method computes it, see `silent`."""
    sums: Tensor = field(init=False)
    """Since the last log line, (len(names),) float64 on the device."""
    bad_step: Tensor = field(init=False)
    """The first step whose loss was not finite, or -1 (scalar, int64 on the device)."""

    def __post_init__(self) -> None:
        distilled = ("distill_loss", *self.distillation_module.term_names) if self.distillation_module.methods else ()
        self.names = ("images", "top1", "top5", "loss", "task_loss", *distilled)
        self.sums = torch.zeros(len(self.names), dtype=torch.float64, device=self.group.device)
        self.bad_step = torch.full((), -1, dtype=torch.int64, device=self.group.device)

    def silent(self, epoch: int) -> frozenset[str]:
        """Those of `names` that nobody computes in an epoch, counted with those of the warm-up stage: it has terms of its own."""
        told = self.distillation_module.told_at(epoch - self.init_epochs)
        return (
            frozenset({"distill_loss", *self.distillation_module.term_names} - told)
            if self.distillation_module.methods
            else frozenset()
        )


class Losses(NamedTuple):
    """The losses of a batch, and what they are made of."""

    weighted: dict[str, Tensor]
    """`task` and `method/term` of every term, weighted: each (B,), of samples, or a scalar, of the global batch."""
    named: dict[str, Tensor]
    """Each (B,) or a scalar: `loss`, `task_loss`, `distill_loss`, and the methods' terms, unweighted."""

    def total(self, weight: Tensor, keys: frozenset[str] | None = None) -> Tensor:
        """This rank's loss (scalar), or that of some: DDP's mean over ranks is that of the global batch.

        `weight` is what a sample's loss counts, see `GlobalCount.weight`.
        """
        terms = [term for key, term in self.weighted.items() if keys is None or key in keys]
        samples, wholes = [term for term in terms if term.ndim], [term for term in terms if not term.ndim]
        parts = [_sum(samples).sum() * weight.to(samples[0].dtype)] if samples else []
        return _sum([*parts, *wholes])


def _sum(terms: Sequence[Tensor]) -> Tensor:
    return reduce(torch.add, terms)


def losses(answer: DistillationOutputs, labels_B: Tensor, mix: Mix | None, weights: Mapping[str, float]) -> Losses:
    """task_weight·CE + Σ over methods of weight·Σ terms. `weights`: of `task` and of each method.

    The CE of mixed images is share·CE(own label) + (1 - share)·CE(the other's); the methods see the image as it is. The CE of
    auxiliary heads (Inception) belongs to the task. Every term is in the graph, whatever its weight: DDP waits for each gradient.
    """
    task_B = cross_entropy(answer.logits_BK, labels_B, mix)
    for weight, aux_BK in answer.aux:
        task_B = task_B + weight * cross_entropy(aux_BK, labels_B, mix)
    named = {f"{key}/{name}": term for key, terms in answer.terms.items() for name, term in terms.items()}
    distilled = {f"{key}/{name}": weights[key] * term for key, terms in answer.terms.items() for name, term in terms.items()}
    weighted = {"task": weights["task"] * task_B, **distilled}
    with torch.no_grad():
        named["loss"] = _sum(list(weighted.values()))
        if distilled:
            named["distill_loss"] = _sum(list(distilled.values()))
    return Losses(weighted, {**named, "task_loss": task_B})


def cross_entropy(logits_BK: Tensor, labels_B: Tensor, mix: Mix | None) -> Tensor:
    """Cross-entropy of each sample (B,), with the labels of both images where two are mixed."""
    own_B = F.cross_entropy(logits_BK, labels_B, reduction="none")
    if mix is None:
        return own_B
    share_B = mix.share_B.to(own_B.dtype)
    return share_B * own_B + (1 - share_B) * F.cross_entropy(logits_BK, mix.labels_B, reduction="none")


def micro_batches(batch: DeviceBatch, accumulate: int, blanks: int = 2) -> list[DeviceBatch]:
    """A prepared batch in at most `accumulate` parts. Where the rank has no samples, `blanks` images without labels.

    A rank without samples still has to take part in DDP's all-reduce. Where its batch norm refuses to normalise nothing, or a
    single image, it runs two blank ones without labels; its statistics are overwritten by rank 0's, which always holds the
    larger share.
    """
    if len(batch.labels_B) == 0:
        return [batch._replace(images_BCHW=batch.images_BCHW.new_zeros((blanks, *batch.images_BCHW.shape[1:])), mix=None)]
    return batch.split(min(accumulate, len(batch.labels_B)))


def train_step(train_state: TrainState, batch: DeviceBatch, step: int, timer: Marks) -> None:
    """Forward, loss, backward, update; adds to `train_state.sums`."""
    group = train_state.group
    batch.wait()
    timer.mark("h2d")
    num_images = len(batch.labels_B)
    count = GlobalCount(num_images, group, parts=num_parts(num_images, group, train_state.accumulate))
    epoch = step / train_state.steps_per_epoch - train_state.init_epochs
    weights, only, asks = (
        train_state.distillation_module.weights(epoch),
        train_state.distillation_module.warms_up(epoch),
        train_state.distillation_module.asks_teacher(epoch),
    )
    student = (
        train_state.student if only is None else train_state.distillation_module
    )  # a warm-up stage does not reach all that DDP would wait for
    parts = micro_batches(train_state.prepare(batch), train_state.accumulate, train_state.blanks)
    timer.mark("augment")
    for part in parts:
        rows = len(part.labels_B)
        asked = TeacherRequest(part.host_indices_B, part.epoch)
        with train_state.autocast():
            taught = train_state.teacher(part.images_BCHW, rows, asked) if train_state.teacher is not None and asks else None
        timer.mark("teacher")
        samples = MethodBatch(
            part.images_BCHW[:rows], part.labels_B, part.indices_B, epoch, Gather(rows, group, train_state.hosts)
        )
        synchronised = part is parts[-1] or not isinstance(student, DistributedDataParallel)
        with contextlib.nullcontext() if synchronised else cast(DistributedDataParallel, student).no_sync():
            with train_state.autocast():
                answer: DistillationOutputs = student(part.images_BCHW, samples, taught)
            train_state.distillation_module.check_terms(answer.terms, epoch)
            loss = losses(answer, part.labels_B, part.mix, weights)
            timer.mark("student")  # before the count, which waits for ranks that have not begun their step
            train_state.updates.backward(loss, count.weight(), train_state.scaler, only)
        if train_state.noise is not None and only is None:
            train_state.noise.end_part(rows)
        timer.mark("backward")
        add_sums(train_state, answer.logits_BK, part.labels_B, loss, step)
    if train_state.noise is not None and only is None:
        train_state.noise.end_step(count, train_state.scaler)
    train_state.updates.step(train_state.scaler, only)
    timer.mark("optimizer")


@torch.no_grad()
def add_sums(train_state: TrainState, student_BK: Tensor, labels_B: Tensor, loss: Losses, step: int) -> None:
    """Add this part's losses and hits to the running sums and note the first loss that is not finite, on the device.

    A loss of the global batch counts for each of its images.
    """
    first, first_five = correct_counts(student_BK, labels_B)
    rows = len(labels_B)
    named = {name: term.sum() if term.ndim else term * rows for name, term in loss.named.items()}
    values = {"images": torch.full_like(first, rows), "top1": first, "top5": first_five, **named}
    zero = train_state.sums.new_zeros(())
    train_state.sums += torch.stack([values[name].double() if name in values else zero for name in train_state.names])
    broken = ~torch.isfinite(named["loss"]) & (train_state.bad_step < 0)
    train_state.bad_step.masked_fill_(broken, step)
