"""Building blocks of methods on logits: temperature, divergence and logit standardization.

Shapes: B batch, K classes.
"""

import torch
from pydantic import Field
from torch import Tensor

from trainables.config import MethodOptions, Positive
from trainables.methods.contract import ModelOutputs


class StandardizeOptions(MethodOptions):
    """Options of a method that reads logits."""

    standardize: bool = Field(False, description="standardize each sample's logits: subtract their mean, divide by their std")

    def logits(self, student: ModelOutputs, teacher: ModelOutputs, temperature: float) -> tuple[Tensor, Tensor]:
        """Return both models' logits (B, K) to divide by `temperature`, standardized with the option `standardize`."""
        student_BK, teacher_BK = student.logits_BK, teacher.logits_at(temperature)
        return (standardized(student_BK), standardized(teacher_BK)) if self.standardize else (student_BK, teacher_BK)


class LogitOptions(StandardizeOptions):
    """Options of a method that softens logits."""

    temperature: Positive = Field(4.0, description="T, by which logits are divided")


def standardized(logits_BK: Tensor) -> Tensor:
    """Compute (z − mean(z)) / (std(z) + 1e-7) for each sample: Sun, Ren, Li, Wang and Cao 2024 (CVPR), algorithm 1.

    "Logit Standardization in Knowledge Distillation". The std is torch's, with K − 1, and 1e-7 is added as in the authors' code.
    Logits that are equal up to rounding become 0, with a gradient of 0 rather than 1e7.
    """
    centred_BK = logits_BK - logits_BK.mean(1, keepdim=True)
    variance_B1 = centred_BK.square().sum(1, keepdim=True) / max(logits_BK.shape[1] - 1, 1)
    rounding_B1 = 4 * torch.finfo(logits_BK.dtype).eps * logits_BK.detach().abs().amax(1, keepdim=True)
    # The square root's gradient at 0 is not finite, so there the variance is replaced by 1.
    varies_B1 = variance_B1 > rounding_B1.square()
    deviation_B1 = torch.where(varies_B1, variance_B1, 1.0).sqrt()
    return torch.where(varies_B1, centred_BK / (deviation_B1 + 1e-7), 0.0)


def soften(logits_BK: Tensor, temperature: float) -> Tensor:
    """Compute logits / T in at least float32: half precision is too inexact for sums over classes and overflows at 65504."""
    return logits_BK.to(torch.promote_types(logits_BK.dtype, torch.float32)) / temperature


def without_target(logits_BK: Tensor, labels_B: Tensor) -> Tensor:
    """Return each sample's logits of all classes except its label's, (B, K - 1), in order.

    They are gathered by index, as a boolean mask would synchronize with a GPU.
    """
    others_J = torch.arange(logits_BK.shape[1] - 1, device=logits_BK.device)
    return logits_BK.gather(1, others_J + (others_J >= labels_B.unsqueeze(1)))


def divergence(student_BK: Tensor, teacher_BK: Tensor) -> Tensor:
    """Compute KL(softmax(teacher) ‖ softmax(student)) of each sample, (B,), from logits."""
    student_log_BK = student_BK.log_softmax(dim=1)
    teacher_log_BK = teacher_BK.log_softmax(dim=1)
    return (teacher_log_BK.exp() * (teacher_log_BK - student_log_BK)).sum(dim=1)
