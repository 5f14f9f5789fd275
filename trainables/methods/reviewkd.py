"""Distilling Knowledge via Knowledge Review: Chen, Liu, Zhao and Jia 2021 (CVPR), sections 3.2 to 3.4.

A level of the teacher teaches this level of the student and all deeper ones. From the deepest to the shallowest, the student's
map is fused with the residual of the deeper levels (attention based fusion, ABF, figure 3a), and the result is compared with the
teacher's map at several sizes (hierarchical context loss, HCL, figure 3b).

ABF: x = BN(conv 1×1 (map)) with M channels; r is the residual of the deeper level, resized to x (nearest);
z = sigmoid(conv 1×1 ([x; r])) with two channels; x = z₀·x + z₁·r, resized to the teacher's map (nearest). x is passed on as the
residual, and BN(conv 3×3 (x)) is compared. M is the number of channels of the student's deepest level, at most 512.

HCL: the mean squared difference, plus 1/2, 1/4, 1/8 of that of both maps averaged to 4×4, 2×2, 1×1, if these are smaller, divided
by the sum of the factors used; summed over levels. The factors are those of the authors' code; the paper does not give them. The
last level is `pooled`, as a map of one position. As in mdistiller for CIFAR, the student is read after the last activation of its
stages, and the teacher before it; for ImageNet both before it (`student_taps: [stages.preact, pooled]`). In the authors' code for
ImageNet an in-place activation overwrites the value that was read before it: `[stages, pooled]` for both.

The weight rises with every step from 0. The authors' CIFAR-100/train.py uses min(1, epoch / 20) with epochs counted from 0, so it
is 0 in the first one (`warmup_by: epoch_from_0`); mdistiller counts from 1 (`epoch_from_1`). That train.py also never puts the
teacher into eval mode, so it normalizes by each batch (`teacher_norm: batch`); ImageNet/imagenet_amp.py and mdistiller do.

Shapes: B batch, C channels, H W positions, M channels of the residual.
"""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from trainables.config import NonNegative
from trainables.distributed.batch_norm import GlobalBatchNorm2d
from trainables.distributed.group import Group
from trainables.methods.contract import BuildContext, Method, MethodBatch, ModelOutputs, ModelSpec, Requirements, mean_per_sample
from trainables.methods.features import TeacherNormOptions, average_pooled, paired_maps

SIZES = (4, 2, 1)
"""Side lengths at which maps are compared, in addition to their own size."""


class ReviewKDOptions(TeacherNormOptions):
    """The authors' weight and warm-up for resnet32x4→resnet8x4 and WRN pairs on CIFAR-100 (resnet56→resnet20: 0.6).

    For ImageNet they use a weight of 1 and no warm-up.
    """

    weight: NonNegative = 5.0
    warmup_epochs: NonNegative = 20.0
    student_taps: tuple[str, ...] = ("stages", "pooled")
    teacher_taps: tuple[str, ...] = ("stages.preact", "pooled")


class ReviewKD(Method):
    """Σ over levels of HCL(ABF(student's levels from this one on), teacher's level)."""

    Options = ReviewKDOptions
    terms = ("review",)
    requires = Requirements(logits=False, whole_batch=True)

    def __init__(self, options: ReviewKDOptions, context: BuildContext) -> None:
        """Raises ExperimentError: student and teacher have different numbers of levels."""
        super().__init__(options, context)
        assert context.teacher is not None
        of_maps = dataclasses.replace(context, student=_of_maps(context.student), teacher=_of_maps(context.teacher))
        pairs = paired_maps("reviewkd", of_maps)
        width = min(512, pairs[-1][0][0])
        self._fusions = nn.ModuleList(
            Fusion(student[0], width, teacher[0], fuses=level < len(pairs), group=context.group)
            for level, (student, teacher) in enumerate(pairs, 1)
        )

    def forward(self, student: ModelOutputs, teacher: ModelOutputs, batch: MethodBatch) -> dict[str, Tensor]:
        """Return `review` of each sample, (B,), summed over levels."""
        deeper_BMHW, losses = None, []
        for level in reversed(range(len(self._fusions))):
            target_BCHW = _as_map(teacher.features[level])
            fused_BCHW, deeper_BMHW = self._fusions[level](_as_map(student.features[level]), deeper_BMHW, target_BCHW.shape[2:])
            losses.append(hierarchical_context_loss(fused_BCHW, target_BCHW))
        return {"review": torch.stack(losses).sum(0)}


class Fusion(nn.Module):
    """ABF of one level; the deepest one has no residual to fuse with."""

    def __init__(self, inputs: int, width: int, outputs: int, *, fuses: bool, group: Group) -> None:
        super().__init__()
        self.narrow = _convolved(inputs, width, 1, group)
        self.widen = _convolved(width, outputs, 3, group)
        self.attention = nn.Conv2d(2 * width, 2, 1) if fuses else None

    def forward(self, map_BCHW: Tensor, deeper_BMHW: Tensor | None, size: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return the map to compare with the teacher's of this `size`, and the residual (B, M, H, W)."""
        x_BMHW: Tensor = self.narrow(map_BCHW)
        if self.attention is not None:
            assert deeper_BMHW is not None
            deeper_BMHW = _nearest(deeper_BMHW, x_BMHW.shape[2:])
            z_B2HW = torch.sigmoid(self.attention(torch.cat([x_BMHW, deeper_BMHW], 1)))
            x_BMHW = x_BMHW * z_B2HW[:, :1] + deeper_BMHW * z_B2HW[:, 1:]
        x_BMHW = _nearest(x_BMHW, size)
        return self.widen(x_BMHW), x_BMHW


def _convolved(inputs: int, outputs: int, kernel: int, group: Group) -> nn.Sequential:
    convolution = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False)
    nn.init.kaiming_uniform_(convolution.weight, a=1)
    return nn.Sequential(convolution, GlobalBatchNorm2d(outputs, group))


def hierarchical_context_loss(student_BCHW: Tensor, teacher_BCHW: Tensor) -> Tensor:
    """Compute HCL of each sample, (B,)."""
    loss_B = mean_per_sample((student_BCHW - teacher_BCHW).square())
    factor = total = 1.0
    for size in SIZES:
        if size < student_BCHW.shape[2]:
            factor /= 2
            total += factor
            pair = (average_pooled(map_BCHW, size, min(size, map_BCHW.shape[3])) for map_BCHW in (student_BCHW, teacher_BCHW))
            loss_B = loss_B + factor * mean_per_sample(torch.sub(*pair).square())
    return loss_B / total


def _nearest(map_BCHW: Tensor, size: Sequence[int]) -> Tensor:
    if map_BCHW.shape[2:] == torch.Size(size):
        return map_BCHW
    return functional.interpolate(map_BCHW, size=tuple(size), mode="nearest")


def _as_map(feature: Tensor) -> Tensor:
    return feature[..., None, None] if feature.ndim == 2 else feature


def _of_maps(model: ModelSpec) -> ModelSpec:
    return dataclasses.replace(model, shapes=tuple((*shape, 1, 1) if len(shape) == 1 else shape for shape in model.shapes))
