"""Several teachers as one: their forward pass, and the mean that a method reads.

The mean of probabilities: a method that divides logits by T gets T·log Σ_j w_j·softmax(z_j/T), the logits whose softmax at T
is the weighted mean of the teachers' (an ensemble as in Hinton, Vinyals and Dean 2015, section 1; You, Xu, Xu and Tao 2017, KDD,
"Learning from Multiple Teacher Networks"). The weights add up to 1. A method that reads the mean at several T gets other logits
for each; `logits_BK` is at 1. Standardised logits are those of the mean.

Shapes: B samples of this rank, C channels, H W pixels, E teachers, K classes.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor, nn

from trainables.methods.contract import ModelOutputs
from trainables.methods.tap_reader import TapReader, at_least_float32
from trainables.models.forward import logits_and_aux


class TeacherEnsemble(nn.Module):
    """Models that run on the same images."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """The logits of every model, (B, E, K)."""
        return torch.stack([logits_and_aux(model(images_BCHW))[0] for model in self.models], dim=1)


class EnsembleReader(TapReader):
    """Reads an ensemble's mean as the logits of one teacher; an ensemble has no taps."""

    def __init__(self, model: nn.Module, shares: Sequence[float], methods: Iterable[str]):
        """`shares`: the teachers' weights, which add up to 1; `methods`: the keys of those that read the mean."""
        super().__init__(model, dict.fromkeys(methods, ()), name="teachers", image_size=1)
        self._shares = tuple(shares)

    def pop(self, output: Tensor, num_rows: int) -> dict[str, ModelOutputs]:
        """Method key → the mean, from the teachers' logits (B, E, K)."""
        logits_BEK = at_least_float32(output[:num_rows])
        mean_BK = mean_logits(logits_BEK, self._shares, 1.0)
        return dict.fromkeys(self._keys, EnsembleOutputs(mean_BK, models_BEK=logits_BEK, shares=self._shares))


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
