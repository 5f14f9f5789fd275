"""Neuron selectivity transfer: Huang and Wang 2017, "Like What You Like: Knowledge Distill via Neuron Selectivity Transfer",
section 4.

Each channel of a map, as a vector over positions with norm 1, is a sample of the neurons' activation pattern. The loss is the
squared maximum mean discrepancy between the student's and the teacher's channels, with the kernel that the paper found best and
RepDistiller and mdistiller use, k(x, y) = (x·y)²:

    mean over i, j of k(s_i, s_j) + k(t_i, t_j) − 2·k(s_i, t_j)

The paper has a factor λ/2; as in the codes, there is no ½ here.

Shapes: B batch, C channels (S of the student, T of the teacher), H W positions, P = H·W.
"""

from torch import Tensor

from trainables.config import MethodOptions, NonNegative
from trainables.methods.contract import BuildContext, Method, MethodBatch, ModelOutputs, Requirements
from trainables.methods.features import paired_maps, pooled_alike, unit


class NSTOptions(MethodOptions):
    """RepDistiller's and mdistiller's defaults for CIFAR-100: weight 50, after each stage."""

    weight: NonNegative = 50.0


class NST(Method):
    """Σ over stages of MMD² between the student's and the teacher's channels, with the kernel (x·y)²."""

    Options = NSTOptions
    terms = ("mmd",)
    taps = ("stages",)
    requires = Requirements(logits=False)

    def __init__(self, options: NSTOptions, context: BuildContext) -> None:
        super().__init__(options, context)
        paired_maps("nst", context)

    def forward(self, student: ModelOutputs, teacher: ModelOutputs, batch: MethodBatch) -> dict[str, Tensor]:
        """Return `mmd` of each sample, (B,)."""
        total_B = student.features[0].new_zeros(len(batch.labels_B))
        for pair in zip(student.features, teacher.features, strict=True):
            student_BSP, teacher_BTP = (unit(map_BCHW.flatten(2)) for map_BCHW in pooled_alike(*pair))
            total_B = total_B + squared_mmd(student_BSP, teacher_BTP)
        return {"mmd": total_B}


def squared_mmd(student_BSP: Tensor, teacher_BTP: Tensor) -> Tensor:
    """Compute MMD² of each sample, (B,), with the kernel (x·y)².

    The mean of (x_i·y_j)² over i, j is the inner product of the P × P matrices XᵀX/S and YᵀY/T, so MMD² is the squared distance
    of these two. If there are more positions than channels, the kernel's S × T entries are fewer and are computed instead.
    """
    (_, students, positions), teachers = student_BSP.shape, teacher_BTP.shape[1]
    if positions <= max(students, teachers):
        apart_BPP = student_BSP.mT @ student_BSP / students - teacher_BTP.mT @ teacher_BTP / teachers
        return apart_BPP.square().sum((1, 2))
    return _kernel(student_BSP, student_BSP) + _kernel(teacher_BTP, teacher_BTP) - 2 * _kernel(student_BSP, teacher_BTP)


def _kernel(x_BSP: Tensor, y_BTP: Tensor) -> Tensor:
    return (x_BSP @ y_BTP.mT).square().mean((1, 2))
