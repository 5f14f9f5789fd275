"""The batch norms that computed a model's values: their scale and shift tell how a pre-activation is distributed."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from trainables.models.tap_names import TapSurvey


def norms_before(model: nn.Module, names: Sequence[str], *, name: str, image_size: int) -> list[_BatchNorm | None]:
    """For each tap of `names` the batch norm whose output it reads, or whose output is the first summand of what it reads.

    In a residual block that is the last norm on its path, not the shortcut's. None where there is no such norm, or where it has
    no scale and shift. `name` is the model's, for messages.

    Raises:
        ModelError: the model has no such tap.
    """
    survey = TapSurvey(model, image_size, name=name)
    found = []
    for tap in chain.from_iterable(map(survey.expand, names)):
        version = survey.find(tap).events[0].version
        norms = (survey.trace.norms.get(value) for value in (version, *survey.trace.sums.get(version, ())))
        found.append(next((norm for norm in norms if isinstance(norm, _BatchNorm) and norm.affine), None))
    return found
