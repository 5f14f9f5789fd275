"""Attention transfer: Zagoruyko and Komodakis 2017 (ICLR), "Paying More Attention to Attention", section 3.1, equation 2.

A map's attention is the sum over channels of |F|^p, p = 2, as a vector over positions, divided by its norm. (RepDistiller uses
the channels' mean, which is equal after normalization.) The paper's loss is half the norm of the difference of two such vectors;
the authors' code, RepDistiller and mdistiller use the mean of its squares.

Shapes: B batch, C channels, H W positions, P = H·W.
"""

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

from trainables.config import MethodOptions, NonNegative
from trainables.methods.contract import BuildContext, Method, MethodBatch, ModelOutputs, Requirements
from trainables.methods.features import paired_maps, pooled_alike, unit


class ATOptions(MethodOptions):
    """RepDistiller's and mdistiller's defaults for CIFAR-100: weight 1000 and p = 2, after each stage."""

    weight: NonNegative = 1000.0
    power: Annotated[float, Field(ge=1)] = Field(2.0, description="p, to which absolute values are raised")
    variant: Literal["repdistiller", "paper"] = Field(
        "repdistiller", description="repdistiller: mean of the squared differences of attention; paper: half their norm"
    )


class AT(Method):
    """Σ over stages of mean(Q_s/‖Q_s‖ − Q_t/‖Q_t‖)², or as in the paper ½·‖Q_s/‖Q_s‖ − Q_t/‖Q_t‖‖."""

    Options = ATOptions
    options: ATOptions
    terms = ("attention",)
    taps = ("stages",)
    requires = Requirements(logits=False)

    def __init__(self, options: ATOptions, context: BuildContext) -> None:
        super().__init__(options, context)
        paired_maps("at", context)

    def forward(self, student: ModelOutputs, teacher: ModelOutputs, batch: MethodBatch) -> dict[str, Tensor]:
        """`attention` of each sample, (B,)."""
        total_B = student.features[0].new_zeros(len(batch.labels_B))
        for pair in zip(student.features, teacher.features, strict=True):
            student_BP, teacher_BP = (attention(map_BCHW, self.options.power) for map_BCHW in pooled_alike(*pair))
            difference_BP = student_BP - teacher_BP
            paper = self.options.variant == "paper"
            # torch's norm has gradient 0 at 0, where both are equal.
            total_B = total_B + (
                0.5 * torch.linalg.vector_norm(difference_BP, dim=1) if paper else difference_BP.square().mean(1)
            )
        return {"attention": total_B}


def attention(map_BCHW: Tensor, power: float = 2.0) -> Tensor:
    """Compute a map's attention, (B, P): the mean over channels of |F|^p, with norm 1; 0 if the map is 0."""
    raised_BCHW = map_BCHW.square() if power == 2 else map_BCHW.abs().pow(power)
    return unit(raised_BCHW.mean(1).flatten(1))
