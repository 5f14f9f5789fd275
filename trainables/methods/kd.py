"""Knowledge distillation: Hinton, Vinyals and Dean 2015, "Distilling the Knowledge in a Neural Network", section 2.

Shapes: B batch, K classes.
"""

from __future__ import annotations

import torch
from torch import Tensor


def soft_loss(student_BK: Tensor, teacher_BK: Tensor, temperature: float) -> Tensor:
    """T²·KL(softmax(teacher/T) ‖ softmax(student/T)) of each sample, (B,).

    T² keeps the gradient's size when T changes (end of section 2). Computed in float32 or wider, under
    autocast too; exactly 0 where the logits are equal; finite wherever the difference of two logits is.
    """
    return temperature**2 * divergence(soften(student_BK, temperature), soften(teacher_BK, temperature))


def soften(logits_BK: Tensor, temperature: float) -> Tensor:
    """logits / T in at least float32: half precision would lose what a sum over classes needs, and overflow beyond 65504."""
    return logits_BK.to(torch.promote_types(logits_BK.dtype, torch.float32)) / temperature


def divergence(student_BK: Tensor, teacher_BK: Tensor) -> Tensor:
    """KL(softmax(teacher) ‖ softmax(student)) of each sample, (B,), from logits."""
    student_log_BK = student_BK.log_softmax(dim=1)
    teacher_log_BK = teacher_BK.log_softmax(dim=1)
    return (teacher_log_BK.exp() * (teacher_log_BK - student_log_BK)).sum(dim=1)
