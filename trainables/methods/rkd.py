"""Relational knowledge distillation, RKD: Park, Kim, Lu and Cho 2019 (CVPR), equations 4 to 9.

- distance: huber(‖s_i − s_j‖/μ_s, ‖t_i − t_j‖/μ_t) over pairs, μ the mean distance of the batch's pairs;
- angle: huber(cos∠s_i s_j s_k, cos∠t_i t_j t_k) over triples, the angle at one sample between two others.

huber is ½x² up to |x| = 1 and |x| − ½ beyond. As in the code of the authors, RepDistiller and mdistiller, means are over all N²
and N³ entries, including the zeros of a sample with itself; the paper's, over distinct samples, are larger by N/(N − 1) and
N²/((N − 1)(N − 2)). Means of nothing are 0. Squared distances are at least 1e-12, as in those codes.

The N³ angles are computed in chunks of vertices, each with its gradient, so that only one chunk is in memory.

Shapes: B samples of this rank, N of the global batch, D features, A vertices of angles.
"""

import torch
from pydantic import Field
from torch import Tensor
from torch.nn import functional

from trainables.config import MethodOptions, NonNegative
from trainables.methods.contract import BuildContext, Method, MethodBatch, ModelOutputs, Requirements
from trainables.methods.features import check_one_tap, unit
from trainables.methods.relations import all_rows, off_diagonal, squared_distances_of_pairs, with_gradient

_CHUNK_SIZE = 2**24
"""Values in one chunk of the angles: 64 MiB in float32."""


class RKDOptions(MethodOptions):
    """The weights of the authors and of RepDistiller."""

    distance: NonNegative = Field(25.0, description="weight of the distances")
    angle: NonNegative = Field(50.0, description="weight of the angles")


class RKD(Method):
    """25·huber of the pairs' distances divided by their mean + 50·huber of the triples' angles."""

    Options = RKDOptions
    options: RKDOptions
    terms = ("distance", "angle")
    taps = ("pooled",)
    requires = Requirements(logits=False, whole_batch=True)

    def __init__(self, options: RKDOptions, context: BuildContext) -> None:
        super().__init__(options, context)
        check_one_tap("rkd", context)

    def forward(self, student: ModelOutputs, teacher: ModelOutputs, batch: MethodBatch) -> dict[str, Tensor]:
        """Return `distance` and `angle`, scalars, multiplied by their weights."""
        student_ND, teacher_ND = all_rows(student, teacher, batch)
        rows = len(student_ND)
        distances = functional.smooth_l1_loss(distances_by_mean(student_ND), distances_by_mean(teacher_ND), reduction="sum")
        return {
            "distance": self.options.distance * distances / max(rows**2, 1),
            "angle": self.options.angle * angle_differences(student_ND, teacher_ND) / max(rows**3, 1),
        }


def distances_by_mean(rows_ND: Tensor) -> Tensor:
    """Compute distances of all pairs divided by the mean over pairs of different samples, (N, N); 0 on the diagonal."""
    rows = len(rows_ND)
    off_NN = off_diagonal(rows_ND)
    # The diagonal is set to 1 under the square root, whose gradient at 0 is not finite.
    distances_NN = (squared_distances_of_pairs(rows_ND) + (1 - off_NN)).sqrt() * off_NN
    mean = distances_NN.sum() / max(rows * (rows - 1), 1)
    return distances_NN / mean.clamp(min=1e-6)


def angle_differences(student_ND: Tensor, teacher_ND: Tensor, *, chunk_size: int = _CHUNK_SIZE) -> Tensor:
    """Compute Σ over triples of huber(cosine of the student's angle, the teacher's), a scalar.

    `chunk_size` is the number of values in memory at once.
    """
    rows, widest = len(student_ND), max(student_ND.shape[1], teacher_ND.shape[1])
    size = max(chunk_size // max(rows * (rows + widest), 1), 1)
    if rows <= size:
        return _angle_differences(student_ND, teacher_ND, student_ND, teacher_ND)
    leaf_ND = student_ND.detach().requires_grad_()
    total, gradient_ND = student_ND.new_zeros(()), torch.zeros_like(student_ND)
    with torch.enable_grad():
        for first in range(0, rows, size):
            at = slice(first, first + size)
            difference = _angle_differences(leaf_ND[at], teacher_ND[at], leaf_ND, teacher_ND)
            gradient_ND += torch.autograd.grad(difference, leaf_ND)[0]
            total += difference.detach()
    return with_gradient(total, gradient_ND, student_ND)


def _angle_differences(student_AD: Tensor, teacher_AD: Tensor, student_ND: Tensor, teacher_ND: Tensor) -> Tensor:
    return functional.smooth_l1_loss(_cosines(student_AD, student_ND), _cosines(teacher_AD, teacher_ND), reduction="sum")


def _cosines(at_AD: Tensor, rows_ND: Tensor) -> Tensor:
    """Compute cosines of the angles at A vertices between all pairs of rows, (A, N, N); 0 if a row is the vertex itself."""
    directions_AND = unit(rows_ND[None] - at_AD[:, None])
    return directions_AND @ directions_AND.transpose(1, 2)
