"""Building blocks of methods that compare samples: the rows of the whole batch, and distances between them.

Shapes: N samples of the global batch, D features.
"""

import torch
from torch import Tensor

from trainables.methods.contract import MethodBatch, ModelOutputs


def all_rows(student: ModelOutputs, teacher: ModelOutputs, batch: MethodBatch) -> tuple[Tensor, ...]:
    """Return the flattened features of every sample of the global batch: the student's (N, D), and the teacher's."""
    return batch.all_gather_many(*(outputs.features[0].flatten(1) for outputs in (student, teacher)))


def squared_distances_of_pairs(rows_ND: Tensor) -> Tensor:
    """Compute squared distances of all pairs, (N, N): at least 1e-12, as in published code, and 0 on the diagonal."""
    rows = len(rows_ND)
    # Centering does not change distances, and far from the origin a difference of squares would lose digits.
    centred_ND = rows_ND - rows_ND.detach().sum(0) / max(rows, 1)
    squares_N = centred_ND.square().sum(1)
    squared_NN = squares_N[:, None] + squares_N[None] - 2 * centred_ND @ centred_ND.T
    return squared_NN.clamp(min=1e-12) * off_diagonal(rows_ND)


def off_diagonal(rows_ND: Tensor) -> Tensor:
    """Return (N, N) with 1 for different samples and 0 on the diagonal."""
    return 1 - torch.eye(len(rows_ND), dtype=rows_ND.dtype, device=rows_ND.device)


def with_gradient(values: Tensor, gradients: Tensor, at: Tensor) -> Tensor:
    """Attach known `gradients` with respect to `at` to `values`: a scalar, or (B,) if each depends on its row of `at`."""
    return values.detach() + (gradients * (at - at.detach())).flatten(values.ndim).sum(-1)
