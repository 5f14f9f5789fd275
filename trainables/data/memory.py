"""A source whose pixels lie in memory: what `digits` and `synthetic` are made of.

Shapes: N samples, M stored images, B samples asked for, C=3 H=W pixels.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image


@dataclass(frozen=True)
class MemorySource:
    """N labelled RGB images, of which M ≤ N are stored: sample i shows stored image i mod M."""

    title: str
    classes: tuple[str, ...]
    labels_N: NDArray[np.int64]
    images_MCHW: NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.labels_N)

    @property
    def size(self) -> int:
        """Height and width of every image in pixels."""
        return int(self.images_MCHW.shape[-1])

    def name(self, index: int) -> str:
        return f"{self.title}/{index}"

    def read(self, index: int) -> Image.Image:
        image_CHW = self.images_MCHW[index % len(self.images_MCHW)]
        return Image.fromarray(np.ascontiguousarray(image_CHW.transpose(1, 2, 0)))

    def read_batch(self, indices_B: NDArray[np.int64], out_BCHW: NDArray[np.uint8]) -> None:
        """Copy the asked images into `out_BCHW`, the same pixels as `read` gives: no PIL image for each sample."""
        np.take(self.images_MCHW, indices_B, axis=0, out=out_BCHW, mode="wrap")
