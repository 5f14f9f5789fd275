"""How alike two models' features of the same images are: linear CKA.

It is of sums over images, in float64: the same for any batches and ranks but for rounding. Shapes: B batch, D and E features.
"""

import torch
from torch import Tensor

from trainables.distributed.group import Group, all_reduce_sum


class LinearCKA:
    """Linear centered kernel alignment (Kornblith et al. 2019, https://arxiv.org/abs/1905.00414), between 0 and 1.

    ‖XᵀY‖² / (‖XᵀX‖ ‖YᵀY‖) of centered features X (N, D) and Y (N, E). It takes (1 + D + E)² numbers of memory.
    """

    def __init__(self, num_x: int, num_y: int, device: torch.device) -> None:
        self.widths = num_x, num_y
        self._sums = torch.zeros(1 + num_x + num_y, 1 + num_x + num_y, dtype=torch.float64, device=device)

    @torch.no_grad()
    def add(self, x_BD: Tensor, y_BE: Tensor) -> None:
        """Count a batch of this rank."""
        rows = torch.cat([torch.ones_like(x_BD[:, :1], dtype=torch.float64), x_BD.double(), y_BE.double()], dim=1)
        self._sums.addmm_(rows.T, rows)  # of all products: with 1 the images and the sums that center the others

    def result(self, group: Group) -> float:
        """Over the images of all ranks; nan where there are none, or one side's features are all equal. Every rank calls it."""
        sums = all_reduce_sum(self._sums.clone(), group)
        products = sums[1:, 1:] - torch.outer(sums[0, 1:], sums[0, 1:]) / sums[0, 0]
        n = self.widths[0]
        norms = (products[:n, n:].norm() ** 2, products[:n, :n].norm(), products[n:, n:].norm())
        xy, xx, yy = torch.stack(norms).tolist()
        return xy / (xx * yy) if xx * yy > 0 else float("nan")
