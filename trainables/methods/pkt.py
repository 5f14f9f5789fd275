"""Probabilistic knowledge transfer, PKT: Passalis and Tefas 2018 (ECCV), equations 3 to 6.

A sample's cosines to the others, as K = ½·(cos + 1), define a distribution p_{j|i} = K_ij/Σ_j K_ij. The student's should equal
the teacher's: Σ p_t·log(p_t/p_s).

`repdistiller`, also in the authors' code and mdistiller: 1e-7 is added to the features' norms and to both probabilities in the
logarithm, i is among its own neighbors, and the loss is the mean over all N² pairs. `paper`: j ≠ i, and the loss is the sum.

Shapes: B samples of this rank, N of the global batch, D features.
"""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from trainables.config import MethodOptions, NonNegative
from trainables.methods.contract import BuildContext, Method, MethodBatch, ModelOutputs, Requirements
from trainables.methods.features import check_one_tap, unit
from trainables.methods.relations import all_rows, off_diagonal

_EPSILON = 1e-7


class PKTOptions(MethodOptions):
    """RepDistiller's weight, for its variant."""

    weight: NonNegative = 30000.0
    variant: Literal["paper", "repdistiller"] = Field("repdistiller", description="the loss, see trainables.methods.pkt")


class PKT(Method):
    """KL(p_t ‖ p_s) of each sample's neighbors, with p from the features' cosines; the mean over pairs."""

    Options = PKTOptions
    options: PKTOptions
    terms = ("kl",)
    taps = ("pooled",)
    requires = Requirements(logits=False, whole_batch=True)

    def __init__(self, options: PKTOptions, context: BuildContext) -> None:
        super().__init__(options, context)
        check_one_tap("pkt", context)

    def forward(self, student: ModelOutputs, teacher: ModelOutputs, batch: MethodBatch) -> dict[str, Tensor]:
        """Return `kl`, a scalar."""
        rows = all_rows(student, teacher, batch)
        if self.options.variant == "paper":
            student_NN, teacher_NN = (neighbours(rows_ND, with_self=False) for rows_ND in rows)
            log_ratio_NN = teacher_NN.clamp(min=_EPSILON).log() - student_NN.clamp(min=_EPSILON).log()
            return {"kl": (teacher_NN * log_ratio_NN).sum()}
        student_NN, teacher_NN = (neighbours(rows_ND, with_self=True) for rows_ND in rows)
        kl_NN = teacher_NN * ((teacher_NN + _EPSILON) / (student_NN + _EPSILON)).log()
        return {"kl": kl_NN.sum() / max(len(kl_NN), 1) ** 2}


def neighbours(rows_ND: Tensor, *, with_self: bool) -> Tensor:
    """Compute p_{j|i} in row i and column j, (N, N), with j = i as in RepDistiller, or without. Uniform for a zero row."""
    if not with_self:
        kernel_NN = _kernel(unit(rows_ND)) * off_diagonal(rows_ND)
        return kernel_NN / kernel_NN.sum(1, keepdim=True).clamp(min=_EPSILON)
    norms_N1 = torch.linalg.vector_norm(rows_ND, dim=1, keepdim=True)
    unit_ND = rows_ND / (norms_N1 + _EPSILON)
    # A zero row gets no gradient, which would otherwise be about 1e7.
    kernel_NN = _kernel(torch.where(norms_N1 > 0, unit_ND, unit_ND.detach()))
    return kernel_NN / kernel_NN.sum(1, keepdim=True)


def _kernel(unit_ND: Tensor) -> Tensor:
    return (unit_ND @ unit_ND.T + 1) / 2
