"""The losses of a micro-batch: the task loss on the labels and the terms of the methods.

Each term is either per sample, shape (B,), or one scalar for the global batch that is the same on every rank. Per-sample losses
stay (B,) until they are summed, so that a gradient weights all samples equally, whatever their rank or micro-batch.
Shapes: B this rank's batch, K classes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from trainables.config import TrainingConfig
from trainables.device.mixing import Mix
from trainables.errors import ExperimentError
from trainables.methods.distillation_module import DistillationOutputs

NO_LABEL = -1


@dataclass(frozen=True)
class TaskLoss:
    """The per-sample loss on labels, (B,). For mixed images it uses the labels of both.

    `label_smoothing`: the target is 1 - ε + ε/K for the label and ε/K for every other class (Szegedy et al. 2016). `bce`: binary
    cross-entropy, averaged over classes; with `bce_threshold`, targets above it become 1 and all others 0 (Wightman et al. 2021,
    "ResNet strikes back").
    """

    label_smoothing: float = 0.0
    bce: bool = False
    bce_threshold: float | None = None

    @classmethod
    def of(cls, train: TrainingConfig) -> "TaskLoss":
        return cls(train.label_smoothing, train.task_loss == "bce", train.bce_threshold)

    def __call__(self, logits_BK: Tensor, labels_B: Tensor, mix: Mix | None) -> Tensor:
        """Return the losses (B,). A sample with the label -1 has the loss 0; `bce` does not support such labels."""
        if self.bce:
            return self._binary(logits_BK, labels_B, mix)
        plain_B = self._cross_entropy(logits_BK, labels_B)
        if mix is None:
            return plain_B
        share_B = mix.share_B.to(plain_B.dtype)
        return share_B * plain_B + (1 - share_B) * self._cross_entropy(logits_BK, mix.labels_B)

    def _cross_entropy(self, logits_BK: Tensor, labels_B: Tensor) -> Tensor:
        return F.cross_entropy(logits_BK, labels_B, reduction="none", ignore_index=NO_LABEL, label_smoothing=self.label_smoothing)

    def _binary(self, logits_BK: Tensor, labels_B: Tensor, mix: Mix | None) -> Tensor:
        targets_BK = F.one_hot(labels_B, logits_BK.shape[1]).to(logits_BK.dtype)
        if mix is not None:
            share_B1 = mix.share_B.to(targets_BK.dtype)[:, None]
            targets_BK = share_B1 * targets_BK + (1 - share_B1) * F.one_hot(mix.labels_B, logits_BK.shape[1])
        targets_BK = (1 - self.label_smoothing) * targets_BK + self.label_smoothing / logits_BK.shape[1]
        if self.bce_threshold is not None:
            targets_BK = (targets_BK > self.bce_threshold).to(targets_BK.dtype)
        return F.binary_cross_entropy_with_logits(logits_BK, targets_BK, reduction="none").mean(1)


class Losses(NamedTuple):
    """The losses of a micro-batch, and their terms."""

    weighted: dict[str, Tensor]
    """The weighted losses `task` and `method/term`: each (B,), or a scalar for the global batch."""
    named: dict[str, Tensor]
    """`loss`, `task_loss`, `distill_loss`, and the unweighted terms of the methods: each (B,) or a scalar."""

    def total(self, weight: Tensor | float, keys: frozenset[str] | None = None) -> Tensor:
        """Return this rank's loss (scalar), scaled so that DDP's mean over ranks is the loss of the global batch.

        `weight` scales per-sample losses, see `GlobalCount.weight`. `keys` selects some of the losses.
        """
        terms = [term for key, term in self.weighted.items() if keys is None or key in keys]
        per_sample, per_batch = [term for term in terms if term.ndim], [term for term in terms if not term.ndim]
        if per_sample and isinstance(weight, Tensor):
            weight = weight.to(per_sample[0].dtype)
        sums = [_sum(per_sample).sum() * weight] if per_sample else []
        return _sum([*sums, *per_batch])

    def with_task_scale(self, scale: Tensor | float) -> "Losses":
        """Return the losses with the task loss multiplied by `scale`, see `GlobalCount.task_scale`."""
        task = self.weighted["task"]
        loss, task_loss = (self.named["loss"] + (scale - 1) * task).detach(), scale * self.named["task_loss"]
        return Losses({**self.weighted, "task": scale * task}, {**self.named, "loss": loss, "task_loss": task_loss})


def _sum(terms: Sequence[Tensor]) -> Tensor:
    return reduce(torch.add, terms)


def compute_losses(
    outputs: DistillationOutputs,
    labels_B: Tensor | None,
    mix: Mix | None,
    weights: Mapping[str, float | Tensor],
    task_loss: TaskLoss = TaskLoss(),
) -> Losses:
    """Compute task_weight·CE + Σ over methods of weight·Σ terms. Without labels (None) the CE is 0.

    `weights` hold a float for all samples or a tensor (B,). `task_loss` may be something other than the CE.

    Mixed images have share·CE(own label) + (1 - share)·CE(other label); methods see the image as it is. The CE of auxiliary
    heads (Inception) is part of the task loss. Every term stays in the graph, even with weight 0, because DDP waits for each
    gradient. A term with weight 0 counts as 0 even if it is not finite, as happens in fp16. The gradients of a task loss with
    weight 0 are 0 too, but a method's term that is not finite still has non-finite gradients.

    Raises ExperimentError: a term has another shape, which torch would broadcast.
    """
    rows = len(outputs.logits_BK)
    for key, terms in outputs.terms.items():
        for name, term in terms.items():
            if term.shape not in ((), (rows,)):
                raise ExperimentError(
                    f"distill.method: {key}'s {name} has the shape {tuple(term.shape)} for {rows} images: return one loss per"
                    f" image, ({rows},), or a scalar of the global batch"
                )
    if labels_B is None:
        task_B = weighted_task_B = _no_task(outputs)
    else:
        task_B = task_loss(outputs.logits_BK, labels_B, mix)
        for weight, aux_BK in outputs.aux:
            task_B = task_B + weight * task_loss(aux_BK, labels_B, mix)
        # Multiplying by 0 is not enough: non-finite logits would still give non-finite gradients.
        weighted_task_B = weights["task"] * task_B if weights["task"] else _no_task(outputs)
    named = {f"{key}/{name}": term for key, terms in outputs.terms.items() for name, term in terms.items()}
    distilled = {
        f"{key}/{name}": _times(weights[key], term) for key, terms in outputs.terms.items() for name, term in terms.items()
    }
    weighted = {"task": weighted_task_B, **distilled}
    with torch.no_grad():
        named["loss"] = _sum(list(weighted.values()))
        if distilled:
            named["distill_loss"] = _sum(list(distilled.values()))
    return Losses(weighted, {**named, "task_loss": task_B})


def _no_task(outputs: DistillationOutputs) -> Tensor:
    """Return a task loss (B,) of zeros with zero gradients."""
    return sum((_zeros(aux_BK).sum(1) for _, aux_BK in outputs.aux), _zeros(outputs.logits_BK).sum(1))


def _zeros(values: Tensor) -> Tensor:
    """Return zeros that are connected to `values` in the graph."""
    return values.masked_fill(torch.ones_like(values, dtype=torch.bool), 0)


def _times(weight: float | Tensor, term: Tensor) -> Tensor:
    if isinstance(weight, Tensor):
        return (weight * term).masked_fill(weight == 0, 0)
    return weight * term if weight else _zeros(term)


def num_labeled(labels_B: Tensor, mix: Mix | None) -> Tensor:
    """Count the images that have a label (scalar, float64). A mixed image counts by the shares of its labeled parts."""
    own_B = (labels_B != NO_LABEL).double()
    if mix is not None:
        own_B = mix.share_B * own_B + (1 - mix.share_B) * (mix.labels_B != NO_LABEL)
    return own_B.sum()
