"""Correlation congruence, CC: Peng, Jin, Liu, Li, Wu, Liu, Zhou and Zhang 2019 (ICCV), equations 5 to 9.

`paper`: correlations of all pairs of samples, L = (1/N²)·Σ_ij (φ(s_i, s_j) − φ(t_i, t_j))². φ is the Gaussian kernel of the
features' directions u by its Taylor series: φ = exp(−2γ)·Σ_{p=0..P} (2γ)^p/p!·(u_i·u_j)^p.

`repdistiller`: RepDistiller's code is another method. Two trained linear layers project student and teacher to 128 features each.
With δ = |e_s − e_t|, the loss is the mean over neighbors in the batch of Σ_d δ_i·δ_{i+1}. It depends on the order of samples,
here that of ranks, and the layers can shrink it to 0.

Published tables do not always state the variant; RepDistiller's are from its own code. The default is the paper's.

Shapes: B samples of this rank, N of the global batch, D features, E embedded features.
"""

import math
from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn

from trainables.config import Count, MethodOptions, Natural, NonNegative, Positive
from trainables.methods.contract import BuildContext, Method, MethodBatch, ModelOutputs, Requirements
from trainables.methods.features import check_one_tap, unit
from trainables.methods.relations import all_rows


class CCOptions(MethodOptions):
    """γ = 0.4 and P = 2 from the paper; the weights of Knowledge-Distillation-Zoo (100) and RepDistiller (0.02) by variant."""

    weight: NonNegative = Field(100.0, description="weight of the method's loss; default 0.02 for variant repdistiller")
    variant: Literal["paper", "repdistiller"] = Field(
        "paper", description="paper: kernel of all pairs of samples; repdistiller: embedded neighbors"
    )
    gamma: Positive = Field(0.4, description="γ of the paper's Gaussian kernel")
    order: Natural = Field(2, description="P, the last power of the paper's Taylor series")
    embedding: Count = Field(128, description="output features of repdistiller's linear layers")

    @model_validator(mode="before")
    @classmethod
    def _weight_of_variant(cls, values: Any) -> Any:
        return {"weight": 0.02, **values} if isinstance(values, dict) and values.get("variant") == "repdistiller" else values


class CC(Method):
    """Mean over pairs of samples of (φ(s_i, s_j) − φ(t_i, t_j))², φ a Gaussian kernel of their directions."""

    Options = CCOptions
    options: CCOptions
    terms = ("correlation",)
    taps = ("pooled",)
    requires = Requirements(logits=False, whole_batch=True)

    def __init__(self, options: CCOptions, context: BuildContext) -> None:
        super().__init__(options, context)
        check_one_tap("cc", context)
        if options.variant == "repdistiller":
            sizes = [math.prod(model.shapes[0]) for model in (context.student, context.teacher) if model is not None]
            self.embed_student, self.embed_teacher = (nn.Linear(size, options.embedding) for size in sizes)

    def forward(self, student: ModelOutputs, teacher: ModelOutputs, batch: MethodBatch) -> dict[str, Tensor]:
        """Return `correlation`, a scalar."""
        if self.options.variant == "repdistiller":
            student_BD, teacher_BD = (outputs.features[0].flatten(1) for outputs in (student, teacher))
            difference_NE = batch.all_gather((self.embed_student(student_BD) - self.embed_teacher(teacher_BD)).abs())
            return {"correlation": (difference_NE[:-1] * difference_NE[1:]).sum() / max(len(difference_NE) - 1, 1)}
        student_ND, teacher_ND = all_rows(student, teacher, batch)
        difference_NN = self._kernel(student_ND) - self._kernel(teacher_ND)
        return {"correlation": difference_NN.square().sum() / max(len(difference_NN), 1) ** 2}

    def _kernel(self, rows_ND: Tensor) -> Tensor:
        directions_ND, double = unit(rows_ND), 2 * self.options.gamma
        cosines_NN = directions_ND @ directions_ND.T
        kernel_NN = torch.zeros_like(cosines_NN)
        for power in reversed(range(self.options.order + 1)):  # Horner's scheme
            kernel_NN = kernel_NN * cosines_NN + double**power / math.factorial(power)
        return math.exp(-double) * kernel_NN
