"""Several teachers as one: the mean that a method on logits reads.

The mean of probabilities: a method that divides logits by T gets T·log Σ_j w_j·softmax(z_j/T), the logits whose softmax at T
is the weighted mean of the teachers' (an ensemble as in Hinton, Vinyals and Dean 2015, section 1; You, Xu, Xu and Tao 2017, KDD,
"Learning from Multiple Teacher Networks"). The weights add up to 1. A method that reads the mean at several T gets other logits
for each; `logits_BK` is at 1. Standardised logits are those of the mean.

Shapes: B samples of this rank, E teachers, K classes.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from trainables.methods.contract import ModelOutputs


def combine(teachers: Sequence[Mapping[str, ModelOutputs]], shares: Sequence[float]) -> dict[str, ModelOutputs]:
    """Method key → the outputs of its teacher, or the mean of all whose outputs have this key. `shares` add up to 1."""
    found = dict[str, ModelOutputs]()
    for key in dict.fromkeys(key for outputs in teachers for key in outputs):
        each = [outputs[key] for outputs in teachers if key in outputs]
        found[key] = each[0]
        if len(each) > 1:
            logits_BEK = torch.stack([outputs.logits_BK for outputs in each], dim=1)
            mean_BK = mean_logits(logits_BEK, shares, 1.0)
            found[key] = EnsembleOutputs(mean_BK, models_BEK=logits_BEK, shares=tuple(shares))
    return found


@dataclass(frozen=True, kw_only=True)
class EnsembleOutputs(ModelOutputs):
    """The mean of an ensemble at any temperature."""

    models_BEK: Tensor
    """The logits of each model."""
    shares: tuple[float, ...]

    def logits_at(self, temperature: float) -> Tensor:
        return mean_logits(self.models_BEK, self.shares, temperature)

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        return replace(super().map(function), models_BEK=function(self.models_BEK))


def mean_logits(logits_BEK: Tensor, shares: Sequence[float], temperature: float) -> Tensor:
    """The logits (B, K) whose softmax at T is Σ_j share_j·softmax(z_j/T)."""
    log_probabilities = (logits_BEK / temperature).log_softmax(2).unbind(1)
    weighted = [log_BK + math.log(share) for log_BK, share in zip(log_probabilities, shares, strict=True)]
    return temperature * torch.stack(weighted, dim=1).logsumexp(1)
