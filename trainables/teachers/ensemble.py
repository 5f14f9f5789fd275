"""Several teachers in one's place: what they answer, and what a method is given of it.

The mean of probabilities: a method that divides logits by T is given T·log Σ_j w_j·softmax(z_j/T), the logits whose softmax at T
is the weighted mean of the teachers' (an ensemble as in Hinton, Vinyals and Dean 2015, section 1; You, Xu, Xu and Tao 2017, KDD,
"Learning from Multiple Teacher Networks"). The weights add up to 1. T is the method's option `temperature`; for a method without
one it is 1. Standardised logits are those of the mean.

Shapes: B samples of this rank, C channels, H W pixels, E teachers, K classes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from trainables.config import TeacherConfig
from trainables.errors import ExperimentError
from trainables.methods.contract import ModelOutputs
from trainables.methods.select import SelectedMethod
from trainables.methods.tap_reader import TapReader, at_least_float32
from trainables.models.forward import logits_and_aux


class SeveralTeachers(nn.Module):
    """Models that see the same images; answers with the logits of each."""

    def __init__(self, models: Sequence[nn.Module]) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """(B, E, K)."""
        return torch.stack([logits_and_aux(model(images_BCHW))[0] for model in self.models], dim=1)


class MeanReader(TapReader):
    """Reads several teachers as if they were one; they have no taps."""

    def __init__(self, shares: Sequence[float], temperatures: Mapping[str, float]):
        """`shares` of the teachers, which add up to 1; `temperatures`: method → the T at which it reads them."""
        super().__init__(nn.Identity(), dict.fromkeys(temperatures, ()), name="teachers", image_size=1)
        self._shares, self._temperatures = tuple(shares), dict(temperatures)

    def pop(self, logits_BK: Tensor, num_rows: int) -> dict[str, ModelOutputs]:
        """Method → the logits that stand for all teachers', given their own (B, E, K)."""
        logits_BEK = at_least_float32(logits_BK[:num_rows])
        found = {at: mean_logits(logits_BEK, self._shares, at) for at in dict.fromkeys(self._temperatures.values())}
        return {key: ModelOutputs(found[at]) for key, at in self._temperatures.items()}


def mean_logits(logits_BEK: Tensor, shares: Sequence[float], temperature: float) -> Tensor:
    """The logits (B, K) whose softmax at T is Σ_j share_j·softmax(z_j/T)."""
    each = (logits_BEK / temperature).log_softmax(2).unbind(1)
    weighted_BEK = torch.stack([log_BK + math.log(share) for log_BK, share in zip(each, shares, strict=True)], dim=1)
    return temperature * weighted_BEK.logsumexp(1)


def check_several(given: TeacherConfig | None, chosen: Sequence[SelectedMethod]) -> None:
    """Refuse methods that read more of a teacher than its logits, where there are several teachers.

    Raises:
        ExperimentError: one line.
    """
    for method in chosen if given is not None and given.others else ():
        requires = method.method_class.requires
        if requires.teacher and (method.teacher_taps or requires.reuses_classifier or requires.teacher_gradient):
            what = f"features ({', '.join(method.teacher_taps)})" if method.teacher_taps else "layers"
            assert given is not None
            raise ExperimentError(
                f"distill.method: {method.key} reads the {what} of a teacher, and of {1 + len(given.others)} teachers there"
                " is only a mean of probabilities: leave out teacher.others, or take a method on logits, such as kd"
            )
