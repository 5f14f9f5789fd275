"""Standardized features of a teacher: Ranzinger, Barker, Heinrich, Molchanov, Catanzaro and Tao 2024, "PHI-S: Distribution
Balancing for Label-Free Multi-Teacher Distillation".

y = W·(x − μ), with the mean μ and the covariance Σ = U·Λ·Uᵀ of the teacher's features (its divisor is their number):

- `per_channel` (equation 6): W = diag(1/σ), σ² the diagonal of Σ; a channel that never changes is left as it is;
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
"""An eigenvalue smaller than the largest by this factor is a zero that was rounded."""


class FeatureStandardizer(nn.Module):
    """y = W·(x − μ), which changes nothing until `finish` has computed both from what `add` was called with."""

    mean_D: Tensor
    weight_DD: Tensor

    def __init__(self, kind: Kind, width: int, *, seed: int, where: str) -> None:
        """`where`: whose features they are, for the notice that there is no Hadamard matrix of this width."""
        super().__init__()
        self._rotation_DD = hadamard(width) if kind == "phi_s" else None
        if kind == "phi_s" and self._rotation_DD is None:
            notice(
                f"{where}: no Hadamard matrix of {width} rows is known here: a random orthogonal matrix takes its place, with"
                " which the channels' variances are 1 on average only"
            )
            generator = torch.Generator().manual_seed(seed)
            self._rotation_DD = torch.linalg.qr(torch.randn(width, width, dtype=torch.float64, generator=generator)).Q
        self.register_buffer("mean_D", torch.zeros(width))
        self.register_buffer("weight_DD", torch.eye(width))
        self._sums: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        """(…, D) standardized."""
        return nn.functional.linear(x - self.mean_D, self.weight_DD)

    def add(self, x_ND: Tensor) -> None:
        """Add features of this rank to the sums, which are in float64."""
        x_NE = torch.cat([x_ND.double(), x_ND.new_ones(len(x_ND), 1, dtype=torch.float64)], 1)
        products_EE = x_NE.T @ x_NE  # Σ x·xᵀ, Σ x and their number
        self._sums = products_EE if self._sums is None else self._sums + products_EE

    def finish(self, group: Group) -> None:
        """Compute μ and W of what all ranks have added, on the CPU, on each of them: eigenvectors may differ by processor."""
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
    """The eigenvectors of a covariance, as columns. Rounding leaves any basis of its null space possible, and any signs: both are
    chosen so that one that was summed in another order gives the same."""
    values_D, vectors_DD = torch.linalg.eigh(covariance_DD)
    marks_D = torch.arange(1, len(values_D) + 1, dtype=values_D.dtype).sqrt()
    null_DR = vectors_DD[:, values_D < _NULL * values_D[-1]]
    if null_DR.shape[1]:
        vectors_DD[:, : null_DR.shape[1]] = null_DR @ torch.linalg.eigh(null_DR.T * marks_D @ null_DR).eigenvectors
    signed_DD: Tensor = vectors_DD * torch.where(marks_D @ vectors_DD < 0, -1.0, 1.0)
    return signed_DD


def hadamard(rows: int) -> Tensor | None:
    """A Hadamard matrix divided by the root of its rows, (R, R) in float64; None: no construction here gives so many rows."""
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
    """(q + 1, q + 1): 0 on the diagonal, ones to its right in the first row and `below` under it in the first column; the rest is
    1 where the difference of row and column is a square modulo q, and −1 elsewhere."""
    character_q = -torch.ones(q, dtype=torch.float64)
    character_q[torch.arange(q) ** 2 % q] = 1
    character_q[0] = 0
    matrix = torch.zeros(q + 1, q + 1, dtype=torch.float64)
    matrix[0, 1:], matrix[1:, 0] = 1, below
    matrix[1:, 1:] = character_q[(torch.arange(q)[:, None] - torch.arange(q)) % q]
    return matrix


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % factor for factor in range(2, int(number**0.5) + 1))
