"""Similarity-preserving distillation, SP: Tung and Mori 2019 (ICCV), equations 1 to 4.

Samples that are similar in the teacher's last feature map should be similar in the student's: G = rows of Q·Qᵀ divided by their
norm, Q (N, C·H·W) the flattened maps; L = ‖G_t − G_s‖_F²/N². RepDistiller and mdistiller compute the same.

Shapes: B samples of this rank, N of the global batch, D features.
"""

from torch import Tensor

from trainables.config import MethodOptions, NonNegative
from trainables.methods.contract import BuildContext, Method, MethodBatch, ModelOutputs, Requirements
from trainables.methods.features import check_one_tap, unit
from trainables.methods.relations import all_rows


class SPOptions(MethodOptions):
    """The paper's and RepDistiller's weight."""

    weight: NonNegative = 3000.0


class SP(Method):
    """‖G_t − G_s‖_F²/N², G the samples' similarities with rows of norm 1."""

    Options = SPOptions
    terms = ("similarity",)
    taps = ("stage-1",)
    requires = Requirements(logits=False, whole_batch=True)

    def __init__(self, options: SPOptions, context: BuildContext) -> None:
        super().__init__(options, context)
        check_one_tap("sp", context)

    def forward(self, student: ModelOutputs, teacher: ModelOutputs, batch: MethodBatch) -> dict[str, Tensor]:
        """Return `similarity`, a scalar."""
        student_ND, teacher_ND = all_rows(student, teacher, batch)
        difference_NN = similarities(student_ND) - similarities(teacher_ND)
        return {"similarity": difference_NN.square().sum() / max(len(difference_NN), 1) ** 2}


def similarities(rows_ND: Tensor) -> Tensor:
    """Compute inner products of all pairs of rows, (N, N), with each row divided by its norm."""
    return unit(rows_ND @ rows_ND.T)
