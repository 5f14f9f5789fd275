"""Decoupled Knowledge Distillation: Zhao, Cui, Song, Qiu and Liang 2022 (CVPR), equations 4 to 7.

KL over K classes is the KL of (target, all others), TCKD, plus (1 - the teacher's target probability) times the KL among the
others, NCKD. DKD weighs the two freely: α·TCKD + β·NCKD.

Shapes: B batch, K classes, J = K - 1 classes other than the target.
"""

from __future__ import annotations

import torch
from torch import Tensor

from trainables.methods.kd import divergence, soften


def dkd_terms(
    student_BK: Tensor, teacher_BK: Tensor, labels_B: Tensor, temperature: float, *, alpha: float = 1.0, beta: float = 8.0
) -> dict[str, Tensor]:
    """`tckd`: T²·α·TCKD and `nckd`: T²·β·NCKD of each sample, (B,), float32 or wider. K is at least 2.

    α = 1 and β = 8 are what the authors publish as the default for CIFAR-100 (the paper tunes β by pair).
    """
    student_B2, student_BJ = _split(soften(student_BK, temperature), labels_B)
    teacher_B2, teacher_BJ = _split(soften(teacher_BK, temperature), labels_B)
    scale = temperature**2
    return {"tckd": scale * alpha * divergence(student_B2, teacher_B2), "nckd": scale * beta * divergence(student_BJ, teacher_BJ)}


def _split(logits_BK: Tensor, labels_B: Tensor) -> tuple[Tensor, Tensor]:
    """Logits of (target, all others together), (B, 2), and of each other class, (B, J).

    The softmax of the first is (p_target, 1 - p_target), since the others' joint logit is their log-sum-exp: nothing is
    subtracted from 1, so a dominating class loses no digits. Gathered by index, since a boolean mask would make a GPU wait.
    """
    labels_B1 = labels_B.unsqueeze(1)
    others_J = torch.arange(logits_BK.shape[1] - 1, device=logits_BK.device)
    others_BJ = logits_BK.gather(1, others_J + (others_J >= labels_B1))
    target_B1 = logits_BK.gather(1, labels_B1)
    return torch.cat([target_B1, others_BJ.logsumexp(dim=1, keepdim=True)], dim=1), others_BJ
