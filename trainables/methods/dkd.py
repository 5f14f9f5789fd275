"""Decoupled Knowledge Distillation: Zhao, Cui, Song, Qiu and Liang 2022 (CVPR), equations 4 to 7.

KL over K classes is the KL of (target, all others), TCKD, plus (1 - the teacher's target probability) times the KL among the
others, NCKD. DKD weighs the two freely: α·TCKD + β·NCKD. Its warm-up raises the weight with every step from 0; the authors' code
(mdistiller) once an epoch, counted from 1, which is half an epoch earlier on average: `warmup_by: epoch_from_1`.

Shapes: B batch, K classes, J = K - 1 classes other than the target.
"""

import torch
from pydantic import Field
from torch import Tensor

from trainables.config import NonNegative
from trainables.errors import ExperimentError
from trainables.methods.contract import BuildContext, Method, MethodBatch, ModelOutputs, Requirements
from trainables.methods.logits import LogitOptions, divergence, soften, without_target


class DKDOptions(LogitOptions):
    """The authors' published defaults for CIFAR-100, α = 1 and β = 8 (the paper tunes β for each pair)."""

    alpha: NonNegative = Field(1.0, description="weight of the target's part, TCKD")
    beta: NonNegative = Field(8.0, description="weight of the part of the other classes, NCKD")
    warmup_epochs: NonNegative = Field(20.0, description="epochs over which the weight rises linearly from 0")


class DKD(Method):
    """T²·(α·TCKD + β·NCKD)."""

    Options = DKDOptions
    options: DKDOptions
    terms = ("tckd", "nckd")
    requires = Requirements(hard_labels=True)
    idle_with_two_classes = "nckd is 0"

    def __init__(self, options: DKDOptions, context: BuildContext) -> None:
        """Raises ExperimentError: there is only one class."""
        super().__init__(options, context)
        if context.num_classes < 2:
            raise ExperimentError("distill.method: dkd compares a sample's class with the others, but the data has only one")

    def forward(self, student: ModelOutputs, teacher: ModelOutputs, batch: MethodBatch) -> dict[str, Tensor]:
        """Return `tckd` and `nckd` of each sample, (B,), multiplied by their weight and T²."""
        options = self.options
        student_BK, teacher_BK = options.logits(student, teacher, options.temperature)
        return dkd_terms(student_BK, teacher_BK, batch.labels_B, options.temperature, alpha=options.alpha, beta=options.beta)


def dkd_terms(
    student_BK: Tensor, teacher_BK: Tensor, labels_B: Tensor, temperature: float, *, alpha: float = 1.0, beta: float = 8.0
) -> dict[str, Tensor]:
    """Return `tckd`, T²·α·TCKD, and `nckd`, T²·β·NCKD, of each sample, (B,), in float32 or wider. K must be at least 2."""
    student_B2, student_BJ = _split(soften(student_BK, temperature), labels_B)
    teacher_B2, teacher_BJ = _split(soften(teacher_BK, temperature), labels_B)
    scale = temperature**2
    return {"tckd": scale * alpha * divergence(student_B2, teacher_B2), "nckd": scale * beta * divergence(student_BJ, teacher_BJ)}


def _split(logits_BK: Tensor, labels_B: Tensor) -> tuple[Tensor, Tensor]:
    """Return logits of (target, all others together), (B, 2), and of each other class, (B, J).

    The softmax of the first is (p_target, 1 - p_target), as the others' joint logit is their log-sum-exp. Nothing is subtracted
    from 1, so a dominating class loses no digits.
    """
    others_BJ = without_target(logits_BK, labels_B)
    target_B1 = logits_BK.gather(1, labels_B.unsqueeze(1))
    return torch.cat([target_B1, others_BJ.logsumexp(dim=1, keepdim=True)], dim=1), others_BJ
