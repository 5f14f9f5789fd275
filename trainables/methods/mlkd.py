"""Multi-level logit distillation, MLKD: Jin, Wang and Lin 2023 (CVPR), section 3.

With P = softmax(z/τ), (N, K) over the batch, summed over the temperatures τ:

- instances: τ²·KL(P_t ‖ P_s) of each sample;
- batch: (1/N)·‖P_s P_sᵀ − P_t P_tᵀ‖_F², the relations of samples;
- class: (1/K)·‖P_sᵀ P_s − P_tᵀ P_t‖_F², those of classes. It grows with N², so weights are not comparable across batch sizes.

This is the paper's loss on one view of each image. The paper's recipe has two views of each image, weakly and strongly augmented,
in one batch; that is up to the data and not done here. The authors' code multiplies the three already reduced losses of the weak
view by a mask of the samples (classes) on which the teacher's confidence is at most the median, effectively by about ½; this is
left out. `standardize` applies only to the instances' level, as in its authors' code (Sun et al. 2024).

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
    """The authors' values for CIFAR-100: 0.1·CE + 0.9·(instances + batch + class), τ = 2, 3, 4, 5, 6."""

    weight: NonNegative = 0.9
    temperatures: Annotated[tuple[Positive, ...], Field(min_length=1)] = Field(
        (2.0, 3.0, 4.0, 5.0, 6.0), description="values of τ, over which the loss is summed"
    )


class MLKD(Method):
    """Σ_τ [τ²·KL(P_t ‖ P_s) + ‖P_s P_sᵀ − P_t P_tᵀ‖²/N + ‖P_sᵀ P_s − P_tᵀ P_t‖²/K]; one view, see the module."""

    Options = MLKDOptions
    options: MLKDOptions
    terms = ("instance", "batch", "class")
    requires = Requirements(whole_batch=True)
    task_weight = 0.1

    def forward(self, student: ModelOutputs, teacher: ModelOutputs, batch: MethodBatch) -> dict[str, Tensor]:
        """Return `instance` of each sample, (B,), and the scalars `batch` and `class`."""
        student_NK, teacher_N = batch.all_gather(student.logits_BK), teacher.map(batch.all_gather)
        options, temperatures = self.options, self.options.temperatures
        levels = [relations((student_NK / t).softmax(1), (teacher_N.logits_at(t) / t).softmax(1)) for t in temperatures]
        return {
            "instance": torch.stack([soft_loss(*options.logits(student, teacher, t), t) for t in temperatures]).sum(0),
            "batch": torch.stack([batch_level for batch_level, _ in levels]).sum(),
            "class": torch.stack([class_level for _, class_level in levels]).sum(),
        }


def relations(student_NK: Tensor, teacher_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the batch and class losses of two sets of probabilities, as scalars; 0 without samples."""
    between_NN = student_NK @ student_NK.T - teacher_NK @ teacher_NK.T
    between_KK = student_NK.T @ student_NK - teacher_NK.T @ teacher_NK
    rows, classes = student_NK.shape
    return between_NN.square().sum() / max(rows, 1), between_KK.square().sum() / classes
