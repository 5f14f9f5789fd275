"""Which sample comes when: a function of (seed, epoch) alone, and a rank's share of it.

Shapes: N samples of the split.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

Split = Literal["train", "val"]


def epoch_order(seed: int, epoch: int, num_samples: int) -> NDArray[np.int64]:
    """The permutation (N,) in which an epoch reads `num_samples` samples; every index once.

    Keyed by the counter-based Philox generator (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011),
    so that no epoch needs the state of the one before. `seed` and `epoch` are in [0, 2**64).
    """
    key = np.array([seed, epoch], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key)).permutation(num_samples)


def split_order(split: Split, seed: int, epoch: int, num_samples: int) -> NDArray[np.int64]:
    """`epoch_order` for training, 0 … N-1 for validation."""
    return epoch_order(seed, epoch, num_samples) if split == "train" else np.arange(num_samples)


def rank_part(start: int, stop: int, rank: int, world_size: int) -> tuple[int, int]:
    """A rank's contiguous half-open part of [start, stop), sized as by `np.array_split`: larger parts first, some empty."""
    size, larger = divmod(stop - start, world_size)
    begin = start + rank * size + min(rank, larger)
    return begin, begin + size + (rank < larger)
