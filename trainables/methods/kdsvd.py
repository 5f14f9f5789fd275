"""Distillation of singular vectors: Lee, Kim and Song 2018 (ECCV), "Self-supervised Knowledge Distillation Using Singular Value
Decomposition", section 3.

A map, as a matrix of positions by channels, is represented by its first k right singular vectors. Each of the teacher's vectors
is paired with the most parallel one of the student's first k + 3, with the sign that makes their product positive; both are
weighted by the teacher's singular values. The relation of a map's vectors a to the next map's b is exp(−(b_i − a_j)²/8) for each
pair of channels i, j; the loss is the squared distance between the student's and the teacher's relations. The authors' TensorFlow
code multiplies it by ½·√k, which `weight` can do.

Differences: if a map of the teacher has fewer than k vectors, k is reduced for all maps (the authors' code reduces it from that
map on; RepDistiller's fails). A singular vector's sign is arbitrary, but the loss depends on it: here the teacher's largest
component is positive, while published code leaves it to the library. The gradient divides by differences of squared singular
values, which are bounded away from 0. mdistiller decomposes another matrix (channels and height by width).

`torch.linalg.eigh` synchronizes with the GPU.

Shapes: B batch, C channels, H W positions, P = H·W, k singular vectors.
"""

from typing import Any

import torch
from pydantic import Field
from torch import Tensor
from torch.autograd.function import once_differentiable

from trainables.config import Count, MethodOptions
from trainables.methods.contract import BuildContext, Method, MethodBatch, ModelOutputs, Requirements
from trainables.methods.features import equal_channels, paired_maps, unit


class KDSVDOptions(MethodOptions):
    """RepDistiller's defaults for CIFAR-100: weight 1, one singular vector of each stage's map."""

    vectors: Count = Field(
        1, description="k, singular vectors of a map that are compared; as many as every map of the teacher has, if that is less"
    )


class KDSVD(Method):
    """Σ over consecutive maps a, b of ‖exp(−(b_i − a_j)²/8) of the student − the same of the teacher‖²."""

    Options = KDSVDOptions
    terms = ("relation",)
    taps = ("stages",)
    requires = Requirements(logits=False)

    def __init__(self, options: KDSVDOptions, context: BuildContext) -> None:
        super().__init__(options, context)
        pairs = paired_maps("kdsvd", context, at_least=2)
        equal_channels("kdsvd", pairs)
        self._vectors = min(options.vectors, *(min(shape[0], shape[1] * shape[2]) for _, shape in pairs))

    def forward(self, student: ModelOutputs, teacher: ModelOutputs, batch: MethodBatch) -> dict[str, Tensor]:
        """Return `relation` of each sample, (B,)."""
        total_B = student.features[0].new_zeros(len(batch.labels_B))
        before: tuple[Tensor, Tensor] | None = None
        for s_BCHW, t_BCHW in zip(student.features, teacher.features, strict=True):
            now = self._aligned(s_BCHW, t_BCHW)
            if before is not None:
                difference_BCCk = _relation(before[0], now[0]) - _relation(before[1], now[1])
                total_B = total_B + difference_BCCk.square().flatten(1).sum(1)
            before = now
        return {"relation": total_B}

    def _aligned(self, student_BCHW: Tensor, teacher_BCHW: Tensor) -> tuple[Tensor, Tensor]:
        """Return the student's vectors paired with the teacher's, and the teacher's, (B, C, k), both weighted."""
        with torch.no_grad():
            values_Bk, teacher_BCk = right_singular(teacher_BCHW, self._vectors)
            largest_B1k = teacher_BCk.abs().argmax(1, keepdim=True)
            teacher_BCk = teacher_BCk * teacher_BCk.gather(1, largest_B1k).sign()
        _, student_BCj = right_singular(student_BCHW, self._vectors + 3)
        with torch.no_grad():
            cosine_Bjk = student_BCj.mT @ teacher_BCk
            nearest_B1k = cosine_Bjk.abs().argmax(1, keepdim=True)
            side_B1k = cosine_Bjk.gather(1, nearest_B1k).sign()
        student_BCk = student_BCj.gather(2, nearest_B1k.expand(-1, student_BCj.shape[1], -1)) * side_B1k
        weights_B1k = unit(values_Bk)[:, None]
        return student_BCk * weights_B1k, teacher_BCk * weights_B1k


def right_singular(map_BCHW: Tensor, max_vectors: int) -> tuple[Tensor, Tensor]:
    """Return up to `max_vectors` singular values (B, k), without gradients, and right singular vectors (B, C, k) of the
    positions × channels matrix.

    They come from the eigenvectors of the smaller of its two Gram matrices. For a zero map, the vectors from the positions' Gram
    matrix are 0.
    """
    x_BPC = map_BCHW.flatten(2).mT
    by_position = x_BPC.shape[1] < x_BPC.shape[2]
    gram = x_BPC @ x_BPC.mT if by_position else x_BPC.mT @ x_BPC
    values, vectors = _Eigen.apply(gram)  # type: ignore[no-untyped-call]
    values_Bk, vectors = values[:, -max_vectors:].flip(1), vectors[:, :, -max_vectors:].flip(2)
    vectors_BCk = unit(x_BPC.mT @ vectors, dim=1) if by_position else vectors
    return values_Bk.clamp(min=0).sqrt(), vectors_BCk


def _relation(earlier_BCk: Tensor, later_BCk: Tensor) -> Tensor:
    """Compute exp(−(b_i − a_j)²/8) for each channel i of the later and j of the earlier map, (B, C, C, k)."""
    return torch.exp(-(later_BCk[:, :, None] - earlier_BCk[:, None]).square() / 8)


class _Eigen(torch.autograd.Function):
    """`eigh` of symmetric matrices with a gradient only through the vectors, which stays finite for equal eigenvalues.

    The gradient of vector j with respect to direction i has the denominator λ_j − λ_i (Ionescu, Vantzos and Sminchisescu 2015,
    equation 15). Its size is clamped to at least √ε times the largest eigenvalue, since below that the two directions agree in
    half of the digits; terms with a zero denominator are dropped.
    """

    @staticmethod
    def forward(ctx: Any, matrices: Tensor) -> tuple[Tensor, Tensor]:
        # eigh raises for non-finite values; the training loop's check of the loss has a better message.
        values, vectors = torch.linalg.eigh(torch.nan_to_num(matrices, 0.0, 0.0, 0.0))
        ctx.save_for_backward(values, vectors)
        ctx.mark_non_differentiable(values)
        return values, vectors

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor, gradient: Tensor) -> Tensor:
        values: Tensor
        vectors: Tensor
        values, vectors = ctx.saved_tensors
        gaps = values[:, None, :] - values[:, :, None]
        tiny = torch.finfo(values.dtype).eps ** 0.5 * values.abs().amax(1)[:, None, None]
        inverse = gaps.sign() / torch.maximum(gaps.abs(), tiny)
        inverse = torch.where(inverse.isfinite(), inverse, 0.0)
        return vectors @ (inverse * (vectors.mT @ gradient)) @ vectors.mT
