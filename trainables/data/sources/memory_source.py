"""A source whose pixels lie in memory: what `digits` and `synthetic` are made of.

Shapes: N samples, M stored images, B samples of a read, H=W pixels, C=3 channels.
"""

import hashlib

import numpy as np
from numpy.typing import NDArray

from trainables.data.interface import Source


class MemorySource(Source):
    """N labelled RGB images, of which M ≤ N are stored: sample i shows stored image i mod M."""

    def __init__(
        self, title: str, *, classes: tuple[str, ...], labels_N: NDArray[np.int64], images_MHWC: NDArray[np.uint8]
    ) -> None:
        self._title, self.classes, self.labels_N, self.images_MHWC = title, classes, labels_N, images_MHWC
        self.size = int(images_MHWC.shape[1])

    def name(self, index: int) -> str:
        return f"{self._title}/{index}"

    def read(self, index: int) -> NDArray[np.uint8]:
        image_HWC: NDArray[np.uint8] = self.images_MHWC[index % len(self.images_MHWC)]
        return image_HWC

    def fingerprint(self) -> str:
        """Of the pixels: see `Source`."""
        shape = f"{len(self)}:{self.images_MHWC.shape}"
        return hashlib.sha256(shape.encode() + np.ascontiguousarray(self.images_MHWC).tobytes()).hexdigest()

    def read_batch(self, indices_B: NDArray[np.int64], out_BHWC: NDArray[np.uint8]) -> None:
        """Copy these images into `out_BHWC` in one call: tiny images are read by the million."""
        np.take(self.images_MHWC, indices_B, axis=0, out=out_BHWC, mode="wrap")
