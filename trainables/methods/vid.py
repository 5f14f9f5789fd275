"""Variational information distillation: Ahn, Hu, Damianou, Lawrence and Dai 2019 (CVPR), "Variational Information Distillation
for Knowledge Transfer", section 2: the loss of the Gaussian observation model.

The mutual information of the teacher's and the student's map has a lower bound with a normal distribution q of the teacher's
values. Its mean μ is computed from the student's map, and its variance σ² is learned for each channel. The loss is −log q without
its constant and may be negative. The paper sums over a map's values, RepDistiller averages them.

In mdistiller the variances are in a plain list, so the optimizer never gets them; here they are learned, as in the paper.

Shapes: B batch, C channels, H W positions.
"""

import math
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from trainables.config import MethodOptions
from trainables.methods.contract import BuildContext, Method, MethodBatch, ModelOutputs, Requirements, mean_per_sample
from trainables.methods.features import Shape, paired_maps, pooled_alike

_MIN_VARIANCE = 1e-5
"""Added to the learned variance, as in RepDistiller."""


class VIDOptions(MethodOptions):
    """RepDistiller's defaults for CIFAR-100: weight 1, variances from 5, after each stage."""

    initial_variance: Annotated[float, Field(gt=_MIN_VARIANCE)] = Field(5.0, description="initial σ² of each channel")
    variant: Literal["repdistiller", "paper"] = Field(
        "repdistiller", description="repdistiller: mean over a map's values; paper: the sum over them"
    )


class VID(Method):
    """Σ over stages of mean((F_t − μ(F_s))²/(2σ²) + ½·log σ²); in the paper's variant the sum over a map's values."""

    Options = VIDOptions
    options: VIDOptions
    terms = ("information",)
    taps = ("stages",)
    requires = Requirements(logits=False)

    def __init__(self, options: VIDOptions, context: BuildContext) -> None:
        super().__init__(options, context)
        self.normals = nn.ModuleList([_Normal(*pair, options.initial_variance) for pair in paired_maps("vid", context)])

    def forward(self, student: ModelOutputs, teacher: ModelOutputs, batch: MethodBatch) -> dict[str, Tensor]:
        """Return `information` of each sample, (B,): the information about the teacher that the student lacks."""
        total_B = student.features[0].new_zeros(len(batch.labels_B))
        for normal, *pair in zip(self.normals, student.features, teacher.features, strict=True):
            values_BCHW = normal(*pooled_alike(*pair))
            paper = self.options.variant == "paper"
            total_B = total_B + (values_BCHW.flatten(1).sum(1) if paper else mean_per_sample(values_BCHW))
        return {"information": total_B}


class _Normal(nn.Module):
    """The distribution of a teacher's map conditioned on the student's."""

    def __init__(self, student: Shape, teacher: Shape, initial_variance: float) -> None:
        super().__init__()
        inputs, outputs = student[0], teacher[0]
        self.mean = nn.Sequential(
            nn.Conv2d(inputs, outputs, 1, bias=False),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 1, bias=False),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 1, bias=False),
        )
        above = initial_variance - _MIN_VARIANCE
        self.raw_variance_C = nn.Parameter(torch.full((outputs,), above + math.log(-math.expm1(-above))))  # softplus's inverse

    def forward(self, student_BCHW: Tensor, teacher_BCHW: Tensor) -> Tensor:
        """Return −log q of each of the teacher's values without the constant, (B, C, H, W)."""
        variance_C11 = (functional.softplus(self.raw_variance_C) + _MIN_VARIANCE)[:, None, None]
        difference_BCHW: Tensor = teacher_BCHW - self.mean(student_BCHW)
        return difference_BCHW.square() / (2 * variance_C11) + 0.5 * variance_C11.log()
