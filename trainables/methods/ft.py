"""Factor transfer: Kim, Park and Kwak 2018 (NeurIPS), "Paraphrasing Complex Network: Network Compression via Factor Transfer",
equations 1 and 4.

In the init stage a paraphraser learns to reconstruct the teacher's last map from fewer channels, the teacher's factor (mean
squared error). Then it is frozen, and a translator, trained with the student, maps the student's map to a similar factor:
‖F_t/‖F_t‖ − F_s/‖F_s‖‖₁. The authors' code uses the mean of the absolute differences (with weight 500). RepDistiller first takes
the mean of a factor's squares over channels, as in attention transfer, and adds batch norms to the translator. The init stage
uses the student's peak learning rate; RepDistiller (helper/pretrain.py) uses 0.01 for ResNet and WRN students: `init_lr: 0.01`.

Shapes: B batch, C channels, H W positions, E values of a normed factor.
"""

from itertools import pairwise
from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from trainables.config import InitStageOptions, NonNegative
from trainables.distributed.batch_norm import GlobalBatchNorm2d
from trainables.distributed.group import Group
from trainables.methods.at import attention
from trainables.methods.contract import BuildContext, Method, MethodBatch, ModelOutputs, Requirements, mean_per_sample
from trainables.methods.features import paired_maps, pooled_alike, unit


class FTOptions(InitStageOptions):
    """RepDistiller's defaults for CIFAR-100: weight 200, 30 epochs for the paraphraser, half the teacher's channels."""

    weight: NonNegative = 200.0
    rate: Annotated[float, Field(gt=0, le=1)] = Field(0.5, description="a factor's channels by the teacher's")
    variant: Literal["repdistiller", "paper"] = Field(
        "repdistiller", description="repdistiller: the mean of factors' attention; paper: the sum over their values"
    )


class FT(Method):
    """‖unit(F_t) − unit(F_s)‖₁ of the factors; RepDistiller: the mean over positions of |Q_t − Q_s|, Q = unit(mean of F²)."""

    Options = FTOptions
    options: FTOptions
    terms = ("factor",)
    init_terms = ("reconstruction",)
    taps = ("stage-1",)
    requires = Requirements(logits=False, whole_batch=True)

    def __init__(self, options: FTOptions, context: BuildContext) -> None:
        super().__init__(options, context)
        group = context.group if options.variant == "repdistiller" else None
        self.paraphrasers, self.builders, self.translators = nn.ModuleList(), nn.ModuleList(), nn.ModuleList()
        for (inputs, *_), (channels, *_) in paired_maps("ft", context):
            factor = max(int(channels * options.rate), 1)
            self.paraphrasers.append(_stack(nn.Conv2d, channels, channels, factor, factor))
            self.builders.append(_stack(nn.ConvTranspose2d, factor, factor, channels, channels))
            self.translators.append(_stack(nn.Conv2d, inputs, inputs, factor, factor, group=group))
        if not context.init_stage:  # then only the translator learns, with the student
            for parameter in self.init_stage_parameters(context.student.model):
                parameter.requires_grad_(False)

    def forward(self, student: ModelOutputs, teacher: ModelOutputs, batch: MethodBatch) -> dict[str, Tensor]:
        """Return `factor` of each sample, (B,)."""
        total_B = student.features[0].new_zeros(len(batch.labels_B))
        modules = zip(self.paraphrasers, self.translators, student.features, teacher.features, strict=True)
        for paraphraser, translator, s_BCHW, t_BCHW in modules:
            with torch.no_grad():
                target_BCHW = paraphraser(t_BCHW)
            factors = pooled_alike(translator(s_BCHW), target_BCHW)
            student_BE, teacher_BE = (self._normed(factor_BCHW) for factor_BCHW in factors)
            difference_BE = (student_BE - teacher_BE).abs()
            total_B = total_B + (difference_BE.sum(1) if self.options.variant == "paper" else difference_BE.mean(1))
        return {"factor": total_B}

    def init_loss(self, student: ModelOutputs, teacher: ModelOutputs, batch: MethodBatch) -> dict[str, Tensor]:
        """Return `reconstruction` of each sample, (B,). The student is not involved."""
        total_B = teacher.features[0].new_zeros(len(batch.labels_B))
        for paraphraser, builder, t_BCHW in zip(self.paraphrasers, self.builders, teacher.features, strict=True):
            total_B = total_B + mean_per_sample((builder(paraphraser(t_BCHW)) - t_BCHW).square())
        return {"reconstruction": total_B}

    def init_stage_parameters(self, student: nn.Module) -> list[nn.Parameter]:
        """Return the parameters of the paraphrasers and of the decoders that reconstruct the map."""
        return [*self.paraphrasers.parameters(), *self.builders.parameters()]

    def _normed(self, factor_BCHW: Tensor) -> Tensor:
        return attention(factor_BCHW) if self.options.variant == "repdistiller" else unit(factor_BCHW.flatten(1))


def _stack(kind: type[nn.Conv2d] | type[nn.ConvTranspose2d], *channels: int, group: Group | None = None) -> nn.Sequential:
    """Build 3 × 3 convolutions from each number of channels to the next, each with a leaky ReLU, and batch norm if `group`."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(channels):
        norm = [GlobalBatchNorm2d(outputs, group)] if group is not None else []
        layers += [kind(inputs, outputs, 3, padding=1), *norm, nn.LeakyReLU(0.1)]
    return nn.Sequential(*layers)
