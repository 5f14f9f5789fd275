"""Knowledge distillation: Hinton, Vinyals and Dean 2015, "Distilling the Knowledge in a Neural Network", equation 1
and section 2. As in DeiT (Touvron, Cord, Douze, Massa, Sablayrolles and Jégou 2021, section 4) the student can learn the
teacher's hard labels, and a transformer can learn through its distillation token.

Shapes: B batch, K classes.
"""

from typing import Any

import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor

from trainables.config import NonNegative
from trainables.methods.contract import Method, MethodBatch, ModelOutputs, Requirements
from trainables.methods.logits import LogitOptions, divergence, soften
from trainables.notices import notice


class KDOptions(LogitOptions):
    """RepDistiller's defaults for CIFAR-100: 0.1·CE + 0.9·KD at T = 4."""

    weight: NonNegative = 0.9
    hard: bool = Field(False, description="cross-entropy with the teacher's most probable class, without temperature")
    token: bool = Field(
        False,
        description="a student with a distillation token: its `head_dist` learns from the teacher, its `head` the labels; "
        "DeiT's has hard: true, weight: 0.5 and distill.task_weight: 0.5",
    )

    @model_validator(mode="before")
    @classmethod
    def _read_heads(cls, written: Any) -> Any:
        if not isinstance(written, dict):
            return written
        if written.get("hard") and "temperature" in written:
            notice("distill.options.kd.temperature is not used, because hard is true")
        return {"student_taps": ("head", "head_dist"), **written} if written.get("token") else written


class KD(Method):
    """T²·KL(softmax(teacher/T) ‖ softmax(student/T)), or with `hard` the cross-entropy with the teacher's hard label."""

    Options = KDOptions
    options: KDOptions
    terms = ("kl",)
    requires = Requirements(all_logits=False)
    task_weight = 0.1

    def forward(self, student: ModelOutputs, teacher: ModelOutputs, batch: MethodBatch) -> dict[str, Tensor]:
        """Return `kl` of each sample, (B,)."""
        if self.options.token:
            student = ModelOutputs(student.features[1])
        if self.options.hard:
            student_BK, teacher_BK = self.options.logits(student, teacher, 1.0)
            return {"kl": F.cross_entropy(soften(student_BK, 1.0), teacher_BK.argmax(1), reduction="none")}
        temperature = self.options.temperature
        return {"kl": soft_loss(*self.options.logits(student, teacher, temperature), temperature)}

    def task_logits(self, student: ModelOutputs) -> Tensor | None:
        """Return the class token's logits of a student with two heads."""
        return student.features[0] if self.options.token else None


def soft_loss(student_BK: Tensor, teacher_BK: Tensor, temperature: float) -> Tensor:
    """Compute T²·KL(softmax(teacher/T) ‖ softmax(student/T)) of each sample, (B,).

    T² makes the gradient's scale independent of T (end of section 2). It is computed in float32 or wider, even under autocast;
    it is exactly 0 for equal logits, and finite if the differences of logits are.
    """
    return temperature**2 * divergence(soften(student_BK, temperature), soften(teacher_BK, temperature))
