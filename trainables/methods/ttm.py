"""Transformed teacher matching, TTM, and its weighted form, WTTM: Zheng and Yang 2024 (ICLR), equations 2 and 7, section 4,
algorithm 1.

"Knowledge Distillation Based on Transformed Teacher Matching". The teacher's probabilities are raised to the power γ = 1/T and
normalized, which is its softmax at temperature T; the student's temperature is 1, and there is no factor T²:
L = KL(softmax(z_t/T) ‖ softmax(z_s)). WTTM weights each sample by U = Σ_k p_t(k)^γ, which is large if the teacher is uncertain.

Shapes: B batch, K classes.
"""

from typing import Any

from pydantic import Field, model_validator
from torch import Tensor

from trainables.config import NonNegative, Positive
from trainables.methods.contract import Method, MethodBatch, ModelOutputs
from trainables.methods.logits import LogitOptions, divergence


class TTMOptions(LogitOptions):
    """The paper's values for vgg13 → vgg8 (table 8); it tunes γ and the weight for each pair.

    TTM: 45 at γ = 0.1; 7 at γ = 0.3 for resnet56 → resnet20; 100 at γ = 0.1 for resnet32x4 → resnet8x4. WTTM, at the same γ:
    2.25, 1.5 and 3. ImageNet, ResNet-34 → 18, WTTM: 1.6 at γ = 0.8.
    """

    weight: NonNegative = Field(45.0, description="weight of the method's loss; default 2.25 with `weighted`")
    temperature: Positive = Field(10.0, description="T, by which the teacher's logits are divided: 1/γ")
    weighted: bool = Field(False, description="WTTM: weight each sample by the sum of its teacher's probabilities to the power γ")

    @model_validator(mode="before")
    @classmethod
    def _weight_of_wttm(cls, values: Any) -> Any:
        return {"weight": 2.25, **values} if isinstance(values, dict) and values.get("weighted") is True else values


class TTM(Method):
    """U·KL(softmax(teacher/T) ‖ softmax(student)), with U = 1 unless `weighted`."""

    Options = TTMOptions
    options: TTMOptions
    terms = ("kl",)

    def forward(self, student: ModelOutputs, teacher: ModelOutputs, batch: MethodBatch) -> dict[str, Tensor]:
        """Return `kl` of each sample, (B,)."""
        options = self.options
        student_BK, teacher_BK = options.logits(student, teacher, options.temperature)
        kl_B = divergence(student_BK, teacher_BK / options.temperature)
        if options.weighted:
            _, teacher_BK = options.logits(student, teacher, 1.0)
            kl_B = kl_B * (teacher_BK.log_softmax(1) / options.temperature).logsumexp(1).exp()
        return {"kl": kl_B}
