"""Multi-level logit distillation, MLKD: Jin, Wang and Lin 2023 (CVPR), section 3.

With P = softmax(z/τ), (N, K) over the batch, summed over the temperatures τ:

- instances: τ²·KL(P_t ‖ P_s) of each sample;
- batch: (1/N)·‖P_s P_sᵀ − P_t P_tᵀ‖_F², how samples relate;
- class: (1/K)·‖P_sᵀ P_s − P_tᵀ P_t‖_F², how classes do. It grows with N², so weights are not comparable over batch sizes.

This is the paper's loss on one view of each image. The recipe of the paper shows each image in two views, weakly and strongly
augmented, in one batch: that is the data's part, and not done here. The authors' code multiplies the three already reduced
losses of the weak view by a mask of the samples (classes) in which the teacher is not surer than in the median one, so in
effect by about ½: left out. `standardize` is for the instances' level only, as in the code of its authors (Sun et al. 2024).

Shapes: B samples of this rank, N of the global batch, K classes.
"""

from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor

from trainables.config import NonNegative, Positive
from trainables.methods.contract import Method, MethodBatch, ModelOutputs, Requirements
from trainables.methods.kd import soft_loss
from trainables.methods.logits import StandardizeOptions


class MLKDOptions(StandardizeOptions):
    """The authors' for CIFAR-100: 0.1·CE + 0.9·(instances + batch + class), τ = 2, 3, 4, 5, 6."""

    weight: NonNegative = 0.9
    temperatures: Annotated[tuple[Positive, ...], Field(min_length=1)] = Field(
        (2.0, 3.0, 4.0, 5.0, 6.0), description="τ, each of which adds to the loss"
    )


class MLKD(Method):
    """Σ_τ [τ²·KL(P_t ‖ P_s) + ‖P_s P_sᵀ − P_t P_tᵀ‖²/N + ‖P_sᵀ P_s − P_tᵀ P_t‖²/K]; one view, see the module."""

    Options = MLKDOptions
    options: MLKDOptions
    terms = ("instance", "batch", "class")
    requires = Requirements(whole_batch=True)
    task_weight = 0.1

    def forward(self, student: ModelOutputs, teacher: ModelOutputs, batch: MethodBatch) -> dict[str, Tensor]:
        """`instance` of each sample, (B,); `batch` and `class`, scalars."""
        student_NK, teacher_N = batch.all_gather(student.logits_BK), teacher.map(batch.all_gather)
        options, temperatures = self.options, self.options.temperatures
        levels = [relations((student_NK / t).softmax(1), (teacher_N.logits_at(t) / t).softmax(1)) for t in temperatures]
        return {
            "instance": torch.stack([soft_loss(*options.logits(student, teacher, t), t) for t in temperatures]).sum(0),
            "batch": torch.stack([batch_level for batch_level, _ in levels]).sum(),
            "class": torch.stack([class_level for _, class_level in levels]).sum(),
        }


def relations(student_NK: Tensor, teacher_NK: Tensor) -> tuple[Tensor, Tensor]:
    """The batch's and the classes' level of two sets of probabilities, scalars; without samples 0."""
    between_NN = student_NK @ student_NK.T - teacher_NK @ teacher_NK.T
    between_KK = student_NK.T @ student_NK - teacher_NK.T @ teacher_NK
    rows, classes = student_NK.shape
    return between_NN.square().sum() / max(rows, 1), between_KK.square().sum() / classes
