"""Normalized knowledge distillation, NKD: Yang, Zeng, Li, Zhang, Yuan and Li 2023 (ICCV), section 3.

"From Knowledge Distillation to Self-Knowledge Distillation: A Unified Approach with Normalized Loss and Customized Soft Labels".
KD's cross-entropy is split into the target's part and that of the other classes, whose probabilities are normalized to sum to 1,
so that they can be equal: L = −T_t·log S_t − γλ²·Σ_{k≠t} N(T_k)·log N(S_k). T_t and S_t are the target's probabilities at
temperature 1, N is the softmax over the other classes at temperature λ. As a cross-entropy it is not 0 when student and teacher
agree.

In an early version of the authors' code the mask kept the target's logit among the others; this follows the corrected one.

Shapes: B batch, K classes, J = K − 1 classes other than the target.
"""

from pydantic import Field
from torch import Tensor

from trainables.config import NonNegative, Positive
from trainables.methods.contract import Method, MethodBatch, ModelOutputs, Requirements
from trainables.methods.logits import LogitOptions, without_target


class NKDOptions(LogitOptions):
    """The paper's values: λ = 1 and γ = 1.5, with a task weight of 1. The authors' λ for CIFAR-100 is 3."""

    temperature: Positive = Field(1.0, description="λ, by which the logits of the other classes are divided")
    gamma: NonNegative = Field(1.5, description="weight of the other classes")


class NKD(Method):
    """−T_t·log S_t − γλ²·Σ_{k≠t} N(T_k)·log N(S_k)."""

    Options = NKDOptions
    options: NKDOptions
    terms = ("target", "others")
    requires = Requirements(hard_labels=True)
    idle_with_two_classes = "others is 0"

    def forward(self, student: ModelOutputs, teacher: ModelOutputs, batch: MethodBatch) -> dict[str, Tensor]:
        """Return `target` and `others` of each sample, (B,), the latter multiplied by γλ²."""
        options, labels_B1 = self.options, batch.labels_B.unsqueeze(1)
        student_BK, teacher_BK = options.logits(student, teacher, 1.0)
        target_B1 = -teacher_BK.softmax(1).gather(1, labels_B1) * student_BK.log_softmax(1).gather(1, labels_B1)
        student_BJ, teacher_BJ = (
            without_target(logits_BK, batch.labels_B) / options.temperature
            for logits_BK in options.logits(student, teacher, options.temperature)
        )
        others_B = -(teacher_BJ.softmax(1) * student_BJ.log_softmax(1)).sum(1)
        return {"target": target_B1.squeeze(1), "others": options.gamma * options.temperature**2 * others_B}
