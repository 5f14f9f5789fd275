"""What methods on feature maps share: directions, sizes that fit, pairs of maps, and the regressor between two of them.

Shapes: B batch, C channels, H W positions, D any features.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

_TINY = 1e-12
"""A norm below this is that of a zero vector, as in torch's `normalize`."""


def unit(x: Tensor, dim: int | Sequence[int] = -1) -> Tensor:
    """`x` divided by its Euclidean norm over `dim`; a zero vector stays one, and its gradient is 0 and not 1e12."""
    norm = torch.linalg.vector_norm(x, dim=dim, keepdim=True)
    direction = x / norm.clamp(min=_TINY)
    return torch.where(norm > _TINY, direction, direction.detach())


def pooled_alike(a_BCHW: Tensor, b_BCHW: Tensor) -> tuple[Tensor, Tensor]:
    """Both maps at the smaller of their heights and widths, by adaptive average pooling. Channels may differ."""
    height, width = min(a_BCHW.shape[2], b_BCHW.shape[2]), min(a_BCHW.shape[3], b_BCHW.shape[3])
    return average_pooled(a_BCHW, height, width), average_pooled(b_BCHW, height, width)


def average_pooled(map_BCHW: Tensor, height: int, width: int) -> Tensor:
    """`adaptive_avg_pool2d` to a size that is no larger. Where it divides the map's, plain pooling: its gradient on a GPU is
    the same in every run, which that of the adaptive one is not."""
    (rows, rest_rows), (columns, rest_columns) = divmod(map_BCHW.shape[2], height), divmod(map_BCHW.shape[3], width)
    if rest_rows or rest_columns:
        return functional.adaptive_avg_pool2d(map_BCHW, (height, width))
    return map_BCHW if rows == columns == 1 else functional.avg_pool2d(map_BCHW, (rows, columns))
