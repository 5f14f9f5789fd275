"""Activation boundaries: Heo, Lee, Yun and Choi 2019 (AAAI), "Knowledge Transfer via Distillation of Activation Boundaries Formed
by Hidden Neurons": the differentiable loss with a margin.

A neuron is active where its value before the ReLU is above 0. The student's value s should be on the same side of 0 as the
teacher's value t, by the margin m at least: the loss is (s + m)² where t ≤ 0 and s > −m, (s − m)² where t > 0 and s ≤ m, and 0
elsewhere. In a stage before training only this loss changes the student, afterwards only the labels' loss, as in RepDistiller.
The authors then distill logits: add kd to the methods. RepDistiller and the authors' code multiply by 3/1000 and halve the weight
from each stage to the one before it; the paper has neither factor.

RepDistiller's init stage (helper/pretrain.py) does not train a WRN's last batch norm, through which the deepest of the three maps
is read: `init_frozen: [bn1]`. For other students it trains everything that the loss depends on.

Shapes: B batch, C channels, H W positions.
"""

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from trainables.config import Count, InitStageOptions, Positive
from trainables.errors import ExperimentError, did_you_mean
from trainables.methods.contract import BuildContext, Method, MethodBatch, ModelOutputs, Requirements
from trainables.methods.features import ConvReg, body_parameters, paired_maps


class ABOptions(InitStageOptions):
    """RepDistiller's defaults for CIFAR-100: 30 epochs, margin 1, before each stage's last ReLU."""

    init_epochs: Count = Field(30, description="epochs before training in which only this loss changes the student")
    init_frozen: tuple[str, ...] = Field(
        (), description="modules of the student that these epochs leave untrained and in eval mode; RepDistiller, for a WRN: bn1"
    )
    margin: Positive = Field(1.0, description="how far on the teacher's side of 0 a value should be")
    variant: Literal["repdistiller", "paper"] = Field(
        "repdistiller", description="repdistiller: each stage counts half the next, and all 3/1000; paper: they count 1"
    )


class AB(Method):
    """Before training: Σ over stages and values of (s + m)²·[t ≤ 0, s > −m] + (s − m)²·[t > 0, s ≤ m]; in it: nothing."""

    Options = ABOptions
    options: ABOptions
    terms = ()
    init_terms = ("boundary",)
    taps = ("stages.preact",)
    requires = Requirements(logits=False, whole_batch=True)

    def __init__(self, options: ABOptions, context: BuildContext) -> None:
        """Raises ExperimentError: `init_frozen` names a module that the student lacks, or everything that would be trained."""
        super().__init__(options, context)
        _check_frozen(options.init_frozen, context.student.model)
        self.connectors = nn.ModuleList(
            [
                nn.Identity() if student == teacher else ConvReg(student, teacher, context.group, relu=False)
                for student, teacher in paired_maps("ab", context)
            ]
        )

    def init_loss(self, student: ModelOutputs, teacher: ModelOutputs, batch: MethodBatch) -> dict[str, Tensor]:
        """Return `boundary` of each sample, (B,): a sum over values, so initially thousands."""
        total_B = student.features[0].new_zeros(len(batch.labels_B))
        weights = self._weights()
        for weight, connector, s_BCHW, t_BCHW in zip(weights, self.connectors, student.features, teacher.features, strict=True):
            crossed_BCHW = beyond_the_boundary(connector(s_BCHW), t_BCHW, self.options.margin)
            total_B = total_B + weight * crossed_BCHW.square().flatten(1).sum(1)
        return {"boundary": total_B}

    def init_stage_parameters(self, student: nn.Module) -> list[nn.Parameter]:
        """Return the parameters of the connectors, and the student's except those of its classifier and `init_frozen`."""
        frozen = {p for name in self.options.init_frozen for p in student.get_submodule(name).parameters()}
        return [p for p in (*body_parameters(student), *self.parameters()) if p not in frozen]

    def _weights(self) -> list[float]:
        if self.options.variant == "paper":
            return [1.0] * len(self.connectors)
        return [3 / 1000 * 0.5**later for later in reversed(range(len(self.connectors)))]


def _check_frozen(names: tuple[str, ...], student: nn.Module) -> None:
    modules = {name: module for name, module in student.named_modules() if name}
    for name in names:
        if name not in modules:
            instead = did_you_mean(name, modules, f"it has {', '.join(dict(student.named_children()))}")
            raise ExperimentError(f"distill.options.ab.init_frozen: the student has no module {name!r}; {instead}")
    frozen = {parameter for name in names for parameter in modules[name].parameters()}
    if names and frozen.issuperset(body_parameters(student)):
        raise ExperimentError("distill.options.ab.init_frozen: it freezes everything that ab would train: leave a module out")


def beyond_the_boundary(student: Tensor, teacher: Tensor, margin: float) -> Tensor:
    """Return the distance of each student value from the margin on the teacher's side of 0; 0 beyond the margin."""
    return torch.where(teacher > 0, (margin - student).clamp(min=0), (student + margin).clamp(min=0))
