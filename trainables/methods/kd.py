"""Knowledge distillation: Hinton, Vinyals and Dean 2015, "Distilling the Knowledge in a Neural Network", equation 1
and section 2.

Shapes: B batch, K classes.
"""

from torch import Tensor

from trainables.config import NonNegative
from trainables.methods.contract import Method, MethodBatch, ModelOutputs, Requirements
from trainables.methods.logits import LogitOptions, divergence, soften


class KDOptions(LogitOptions):
    """RepDistiller's defaults for CIFAR-100: 0.1·CE + 0.9·KD at T = 4."""

    weight: NonNegative = 0.9


class KD(Method):
    """T²·KL(softmax(teacher/T) ‖ softmax(student/T))."""

    Options = KDOptions
    options: KDOptions
    terms = ("kl",)
    requires = Requirements(all_logits=False)
    task_weight = 0.1

    def forward(self, student: ModelOutputs, teacher: ModelOutputs, batch: MethodBatch) -> dict[str, Tensor]:
        """`kl` of each sample, (B,)."""
        temperature = self.options.temperature
        return {"kl": soft_loss(*self.options.logits(student, teacher, temperature), temperature)}


def soft_loss(student_BK: Tensor, teacher_BK: Tensor, temperature: float) -> Tensor:
    """T²·KL(softmax(teacher/T) ‖ softmax(student/T)) of each sample, (B,).

    T² makes the gradient's size independent of T (end of section 2). Computed in float32 or wider, under
    autocast too; exactly 0 where the logits are equal; finite wherever the difference of two logits is.
    """
    return temperature**2 * divergence(soften(student_BK, temperature), soften(teacher_BK, temperature))
