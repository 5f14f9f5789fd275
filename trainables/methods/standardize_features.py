"""Standardized features of a teacher: Ranzinger, Barker, Heinrich, Molchanov, Catanzaro and Tao 2024, "PHI-S: Distribution
Balancing for Label-Free Multi-Teacher Distillation".

y = W·(x − μ), with the mean μ and the covariance Σ = U·Λ·Uᵀ of the teacher's features (divided by their number):

- `per_channel` (equation 6): W = diag(1/σ), σ² the diagonal of Σ; a constant channel is not scaled;
- `phi_s` (equations 22 to 26): W = φ⁻¹·H·Uᵀ, φ² the mean of Λ, and H a normalized Hadamard matrix, each of whose entries is
  ±1/√D, so that the variance of every channel is 1 and distances change by one factor.

Hadamard matrices are Sylvester's products with those of Paley's two constructions (1933), for a prime q: q + 1 rows where
q mod 4 = 3, and 2·(q + 1) where q mod 4 = 1.

Shapes: N features, of D numbers each; R rows of a matrix.
"""

import math
from typing import Literal

import torch
from torch import Tensor, nn

from trainables.distributed.group import Group, all_reduce_sum
from trainables.notices import notice

Kind = Literal["per_channel", "phi_s"]

_NULL = 1e-10
"""An eigenvalue smaller than the largest by this factor is a rounded zero."""


class FeatureStandardizer(nn.Module):
    """Computes y = W·(x − μ). It is the identity until `finish` has computed W and μ from the features given to `add`."""

    mean_D: Tensor
    weight_DD: Tensor

    def __init__(self, kind: Kind, width: int, *, seed: int, where: str) -> None:
        """`where` describes the features in the notice that there is no Hadamard matrix of this width."""
        super().__init__()
        self._rotation_DD = hadamard(width) if kind == "phi_s" else None
        if kind == "phi_s" and self._rotation_DD is None:
            notice(
                f"{where}: no Hadamard matrix with {width} rows can be constructed: a random orthogonal matrix is used instead,"
                " so the channels' variances are only 1 on average"
            )
            generator = torch.Generator().manual_seed(seed)
            self._rotation_DD = torch.linalg.qr(torch.randn(width, width, dtype=torch.float64, generator=generator)).Q
        self.register_buffer("mean_D", torch.zeros(width))
        self.register_buffer("weight_DD", torch.eye(width))
        self._sums: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Standardize (…, D)."""
        return nn.functional.linear(x - self.mean_D, self.weight_DD)

    def add(self, x_ND: Tensor) -> None:
        """Add features of this rank to the float64 sums."""
        x_NE = torch.cat([x_ND.double(), x_ND.new_ones(len(x_ND), 1, dtype=torch.float64)], 1)
        products_EE = x_NE.T @ x_NE  # Σ x·xᵀ, Σ x and N
        self._sums = products_EE if self._sums is None else self._sums + products_EE

    def finish(self, group: Group) -> None:
        """Compute μ and W from the sums of all ranks, on the CPU of each rank. Eigenvectors may differ between processors."""
        assert self._sums is not None
        sums_EE = all_reduce_sum(self._sums, group).cpu()
        number = sums_EE[-1, -1].clamp(min=1)
        mean_D = sums_EE[-1, :-1] / number
        covariance_DD = sums_EE[:-1, :-1] / number - mean_D[:, None] * mean_D
        self.mean_D.copy_(mean_D)
        self.weight_DD.copy_(self._weight(covariance_DD))
        self._sums = None

    def _weight(self, covariance_DD: Tensor) -> Tensor:
        variances_D = covariance_DD.diagonal()
        if self._rotation_DD is None:
            return torch.where(variances_D > _NULL * variances_D.max(), variances_D, 1.0).rsqrt().diag()
        mean = variances_D.mean()
        return self._rotation_DD @ eigenvectors(covariance_DD).T / (mean.sqrt() if mean > 0 else 1.0)


def eigenvectors(covariance_DD: Tensor) -> Tensor:
    """Return a covariance's eigenvectors as columns. Signs and the basis of the null space, which rounding would decide, are
    chosen so that they do not depend on the order of summation."""
    values_D, vectors_DD = torch.linalg.eigh(covariance_DD)
    marks_D = torch.arange(1, len(values_D) + 1, dtype=values_D.dtype).sqrt()
    null_DR = vectors_DD[:, values_D < _NULL * values_D[-1]]
    if null_DR.shape[1]:
        vectors_DD[:, : null_DR.shape[1]] = null_DR @ torch.linalg.eigh(null_DR.T * marks_D @ null_DR).eigenvectors
    signed_DD: Tensor = vectors_DD * torch.where(marks_D @ vectors_DD < 0, -1.0, 1.0)
    return signed_DD


def hadamard(rows: int) -> Tensor | None:
    """Build a Hadamard matrix divided by √R, (R, R) in float64; None if the constructions do not cover this size."""
    if rows == 1:
        return torch.ones(1, 1, dtype=torch.float64)
    pair = torch.tensor([[1, 1], [1, -1]], dtype=torch.float64)
    if rows % 2 == 0 and (half := hadamard(rows // 2)) is not None:
        return torch.kron(pair, half) / math.sqrt(2)
    if rows % 4 == 0 and _is_prime(rows - 1):
        signs_RR = _conference(rows - 1, below=-1) + torch.eye(rows)
    elif rows % 8 == 4 and _is_prime(rows // 2 - 1):
        diagonal_RR = torch.kron(torch.eye(rows // 2), torch.tensor([[1, -1], [-1, -1]]))
        signs_RR = torch.kron(_conference(rows // 2 - 1, below=1), pair) + diagonal_RR
    else:
        return None
    return signs_RR / math.sqrt(rows)


def _conference(q: int, *, below: int) -> Tensor:
    """Build (q + 1, q + 1): 0 on the diagonal, 1 in the rest of the first row and `below` in the rest of the first column. Other
    entries are 1 if the difference of row and column is a square modulo q, else −1."""
    character_q = -torch.ones(q, dtype=torch.float64)
    character_q[torch.arange(q) ** 2 % q] = 1
    character_q[0] = 0
    matrix = torch.zeros(q + 1, q + 1, dtype=torch.float64)
    matrix[0, 1:], matrix[1:, 0] = 1, below
    matrix[1:, 1:] = character_q[(torch.arange(q)[:, None] - torch.arange(q)) % q]
    return matrix


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % factor for factor in range(2, int(number**0.5) + 1))
