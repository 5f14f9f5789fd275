"""Linear CKA: the similarity of two models' features of the same images.

It uses float64 sums over images, so batches and ranks change the result only by rounding. Shapes: B batch, D and E features.
"""

import torch
from torch import Tensor

from trainables.distributed.group import Group, all_reduce_sum


class LinearCKA:
    """Linear centered kernel alignment (Kornblith et al. 2019, https://arxiv.org/abs/1905.00414), between 0 and 1.

    ‖XᵀY‖² / (‖XᵀX‖ ‖YᵀY‖) for centered features X (N, D) and Y (N, E). It stores (1 + D + E)² numbers.
    """

    def __init__(self, num_x: int, num_y: int, device: torch.device) -> None:
        self.widths = num_x, num_y
        self._sums = torch.zeros(1 + num_x + num_y, 1 + num_x + num_y, dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(self, x_BD: Tensor, y_BE: Tensor) -> None:
        """Add a batch of this rank."""
        rows = torch.cat([torch.ones_like(x_BD[:, :1], dtype=torch.float64), x_BD.double(), y_BE.double()], dim=1)
        self._sums.addmm_(rows.T, rows)  # all products; those with 1 give the count and the sums for centering

    def result(self, group: Group) -> float:
        """Return the CKA over all ranks; NaN without images, or if one side's features are all equal. All ranks must call it."""
        sums = all_reduce_sum(self._sums.clone(), group)
        products = sums[1:, 1:] - torch.outer(sums[0, 1:], sums[0, 1:]) / sums[0, 0]
        n = self.widths[0]
        norms = (products[:n, n:].norm() ** 2, products[:n, :n].norm(), products[n:, n:].norm())
        xy, xx, yy = torch.stack(norms).tolist()
        return xy / (xx * yy) if xx * yy > 0 else float("nan")
