"""A Comprehensive Overhaul of Feature Distillation: Heo, Kim, Yun, Park, Kwak and Choi 2019 (ICCV), sections 3.1 to 3.4.

Features are compared before a stage's last ReLU. The teacher's value t becomes max(t, m), with a margin m below 0 for each
channel (equation 3): where t is above 0 the student's value s should equal it; elsewhere the ReLU cuts t off, and s should be no
higher than the margin. So the partial distance (equation 4) leaves out the values where s is below the target and t not above 0:

    d = Σ over C, H and W of (s − max(t, m))² · [s > max(t, m) or t > 0]

m is the mean of the negative part of a normal distribution with the mean β and the standard deviation |γ| of the batch norm that
computed t: m = β − |γ|·φ(β/γ)/Φ(−β/|γ|), or −3|γ| if less than 0.001 of it is negative (the authors' code). If γ is 0, it is
min(β, 0). After a residual sum, β and γ are those of the block's last batch norm, not of its shortcut's, as in their code.

The student's map passes a 1×1 convolution and a batch norm. Stage i of n has the weight 2^(i − n). The teacher's map is averaged
to the student's size. The authors' code never puts the teacher into eval mode, so it normalizes by each batch; here it uses
running statistics, as for any other method.

Shapes: B batch, C channels, H W positions.
"""

import math

import torch
from torch import Tensor, nn

from trainables.config import MethodOptions, NonNegative
from trainables.errors import ExperimentError
from trainables.methods.contract import BuildContext, Method, MethodBatch, ModelOutputs, Requirements
from trainables.methods.features import average_pooled, connector, paired_maps
from trainables.models.tap_names import norms_before


class OFDOptions(MethodOptions):
    """The authors' weight for CIFAR; for ImageNet they take 1e-4."""

    weight: NonNegative = 1e-3


class OFD(Method):
    """Σ over stages of 2^(i − n)·‖r(student) − max(teacher, m)‖², where the student is above it or the teacher above 0."""

    Options = OFDOptions
    terms = ("partial",)
    taps = ("stages.preact",)
    requires = Requirements(logits=False, whole_batch=True)

    def __init__(self, options: OFDOptions, context: BuildContext) -> None:
        """Raises ExperimentError: no batch norm is found before a teacher's tap, or the maps cannot be paired."""
        super().__init__(options, context)
        pairs = paired_maps("ofd", context)
        assert context.teacher is not None
        names = options.teacher_taps or self.taps
        model = context.teacher.model
        norms = norms_before(model, names, name=f"{type(model).__name__} (the teacher)", image_size=context.image_size)
        self._connectors = nn.ModuleList(connector(student[0], teacher[0], context.group) for student, teacher in pairs)
        for index, norm in enumerate(norms):
            if norm is None:
                raise ExperimentError(
                    f"distill.options.ofd.teacher_taps: the teacher's map {index + 1} of {len(norms)} is not the output of a "
                    "batch norm with scale and shift, nor a sum with one: tap batch norm outputs, or choose another method"
                )
            # Not saved in the checkpoint, as the teacher determines them. float64 for jobs in float64.
            self.register_buffer(f"_margin{index}", margins(norm.weight, norm.bias), persistent=False)

    def forward(self, student: ModelOutputs, teacher: ModelOutputs, batch: MethodBatch) -> dict[str, Tensor]:
        """Return `partial` of each sample, (B,), the weighted sum over stages."""
        distances = []
        for index, connected in enumerate(self._connectors):
            connected_BCHW = connected(student.features[index])
            target_BCHW = average_pooled(teacher.features[index], *connected_BCHW.shape[2:])
            distance_B = partial_distance(connected_BCHW, target_BCHW, self.get_buffer(f"_margin{index}"))
            distances.append(distance_B * 2.0 ** (index + 1 - len(self._connectors)))
        return {"partial": torch.stack(distances).sum(0)}


@torch.no_grad()
def margins(scale_C: Tensor, shift_C: Tensor) -> Tensor:
    """Compute the mean of the negative part of a normal distribution with mean `shift` and std |scale|, (C,) in float64."""
    deviation_C, mean_C = scale_C.detach().cpu().double().abs(), shift_C.detach().cpu().double()
    some_C = deviation_C > 0
    z_C = mean_C / torch.where(some_C, deviation_C, 1.0)
    density_C = torch.exp(-0.5 * z_C.square()) / math.sqrt(2 * math.pi)
    negative_C = torch.special.ndtr(-z_C)
    tail_C = mean_C - deviation_C * density_C / negative_C.clamp(min=1e-3)
    usual_C = torch.where(negative_C > 1e-3, tail_C, -3 * deviation_C)
    return torch.where(some_C, usual_C, mean_C.clamp(max=0))


def partial_distance(student_BCHW: Tensor, teacher_BCHW: Tensor, margin_C: Tensor) -> Tensor:
    """Compute Σ (student − max(teacher, margin))² of each sample, (B,), where student > target or teacher > 0."""
    target_BCHW = torch.maximum(teacher_BCHW, margin_C[:, None, None].to(teacher_BCHW.dtype))
    counts_BCHW = (student_BCHW > target_BCHW) | (teacher_BCHW > 0)
    difference_BCHW = torch.where(counts_BCHW, student_BCHW - target_BCHW, 0.0)
    return difference_BCHW.square().flatten(1).sum(1)
