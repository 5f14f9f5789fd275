"""Distillation from a stronger teacher, DIST: Huang, You, Wang, Qian and Xu 2022 (NeurIPS), section 3.

With y = softmax(z/τ) and Pearson's correlation ρ(a, b) = cos(a − mean(a), b − mean(b)):

- L_inter: the mean over samples i of 1 − ρ(y_s[i, :], y_t[i, :]), the relation of a sample's classes;
- L_intra: the mean over classes k of 1 − ρ(y_s[:, k], y_t[:, k]), the relation of the batch's samples in a class.

L = τ²·(β·L_inter + γ·L_intra), with τ² as in the authors' code for classification. As there, 1e-8 is added to the product of the
norms, which matters for small probabilities: with many classes, or for a class that the batch lacks.

Shapes: B samples of this rank, N of the global batch, K classes.
"""

import torch
from pydantic import Field
from torch import Tensor

from trainables.config import NonNegative
from trainables.methods.contract import Method, MethodBatch, ModelOutputs, Requirements
from trainables.methods.logits import LogitOptions


class DISTOptions(LogitOptions):
    """The paper's values: β = γ = 2; τ = 4 for CIFAR-100, 1 for ImageNet."""

    beta: NonNegative = Field(2.0, description="weight of the classes' relation within a sample")
    gamma: NonNegative = Field(2.0, description="weight of the samples' relation within a class")


class DIST(Method):
    """τ²·(β·(1 − ρ of each sample's classes) + γ·(1 − ρ of each class's samples))."""

    Options = DISTOptions
    options: DISTOptions
    terms = ("inter", "intra")
    requires = Requirements(whole_batch=True)
    idle_with_two_classes = "inter has hardly a gradient"

    def forward(self, student: ModelOutputs, teacher: ModelOutputs, batch: MethodBatch) -> dict[str, Tensor]:
        """Return `inter` of each sample, (B,), and `intra`, a scalar, both multiplied by their weight and τ²."""
        options, temperature = self.options, self.options.temperature
        student_BK, teacher_BK = ((z_BK / temperature).softmax(1) for z_BK in options.logits(student, teacher, temperature))
        inter_B = 1 - correlations(student_BK, teacher_BK)
        student_NK, teacher_NK = batch.all_gather_many(student_BK, teacher_BK)
        intra_K = 1 - correlations(student_NK.T, teacher_NK.T)
        scale = temperature**2
        return {"inter": scale * options.beta * inter_B, "intra": scale * options.gamma * intra_K.mean()}


def correlations(a_RD: Tensor, b_RD: Tensor) -> Tensor:
    """Compute Pearson's correlation of each row of `a_RD` with that of `b_RD`, (R,).

    For a constant row it is 0 without a gradient, as the formula's would be about 1e8.
    """
    (a_RD, varies_R), (b_RD, _) = _centred(a_RD), _centred(b_RD)
    norms_R: Tensor = torch.linalg.vector_norm(a_RD, dim=1) * torch.linalg.vector_norm(b_RD, dim=1)
    correlations_R = (a_RD * b_RD).sum(1) / (norms_R + 1e-8)
    return torch.where(varies_R, correlations_R, correlations_R.detach())


def _centred(rows_RD: Tensor) -> tuple[Tensor, Tensor]:
    """Center the rows, and return which of them are larger than rounding errors afterwards, (R,)."""
    centred_RD = rows_RD - rows_RD.sum(1, keepdim=True) / max(rows_RD.shape[1], 1)
    sizes_R, were_R = (torch.linalg.vector_norm(x.detach(), dim=1) for x in (centred_RD, rows_RD))
    return centred_RD, sizes_R > 4 * torch.finfo(rows_RD.dtype).eps * were_R
