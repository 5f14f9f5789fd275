"""What lies where in the memory of a loader's batch: pixels, labels and indices, one behind the other.

Shapes: B samples of one batch, at most `rows`; C=3 channels, H=W=`image_size` pixels.
"""

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class BatchLayout(NamedTuple):
    """Of blocks for batches of up to `rows` samples."""

    rows: int
    image_size: int

    @property
    def images_shape(self) -> tuple[int, int, int, int]:
        return self.rows, self.image_size, self.image_size, 3

    @property
    def labels_at(self) -> int:
        """Where the pixels (uint8) have ended and the int64 follow: a label a sample, then an index a sample."""
        return -(-math.prod(self.images_shape) // 8) * 8

    @property
    def num_bytes(self) -> int:
        return self.labels_at + 16 * self.rows

    def arrays(self, block: NDArray[np.uint8]) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """images_BCHW (channels last in memory), labels_B and indices_B of all rows of a block."""
        images_BHWC = block[: math.prod(self.images_shape)].reshape(self.images_shape)
        labels_B, indices_B = block[self.labels_at : self.num_bytes].view(np.int64).reshape(2, self.rows)
        return images_BHWC.transpose(0, 3, 1, 2), labels_B, indices_B
