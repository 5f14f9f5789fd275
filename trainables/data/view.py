"""From a stored sample to the pixels that the models see: decode, crop, resize, flip.

Shapes: U random numbers a sample, H=W=data.image_size pixels, C=3 channels.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trainables.config import DataConfig
from trainables.data.augment import AUGMENTS
from trainables.data.decode import Sample, decode_image
from trainables.data.order import Split


class View:
    """How one split's samples become pixels. Safe from several threads at once."""

    def __init__(self, data: DataConfig, split: Split) -> None:
        self._augment = AUGMENTS[data.augment if split == "train" else "none"]
        self._image_size, self._val_resize = data.image_size, data.val_resize
        self.num_uniforms = self._augment.num_uniforms

    def leaves(self, size: int) -> bool:
        """Whether images of this height and width are shown as they are stored."""
        return self._augment is AUGMENTS["none"] and self._val_resize is None and self._image_size == size

    def into(self, sample: Sample, uniforms_U: NDArray[np.float64], out_HWC: NDArray[np.uint8]) -> None:
        """Fill `out_HWC` (contiguous) with the view of `sample` that these random numbers in [0, 1) choose.

        Raises UnreadableImageError where the sample holds no whole image; `out_HWC` is then undefined.
        """
        out_HWC[:] = self._augment.apply(decode_image(sample), uniforms_U, self._image_size, self._val_resize)
