"""From a stored sample to the pixels that the models see: crop, decode what the crop needs, resize, flip.

Shapes: U random numbers a sample, H=W=data.image_size pixels, C=3 channels.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trainables.config import DataConfig
from trainables.data.augment import AUGMENTS, Recipe
from trainables.data.decode import Sample, StoredImage
from trainables.data.decoders import open_decoder
from trainables.data.order import Split


class View:
    """How one split's samples become pixels. Safe from several threads at once.

    Raises DataError where `data.decoder` is not installed.
    """

    def __init__(self, data: DataConfig, split: Split) -> None:
        training = split == "train"
        self._augment = AUGMENTS[data.augment if training else "none"]
        # what validation says is compared with published figures
        self._recipe = Recipe(data.val_resize, exact=not training or data.fidelity == "exact")
        self._image_size = data.image_size
        self._decoder = open_decoder(data.decoder)
        self.num_uniforms = self._augment.num_uniforms

    @property
    def decoder(self) -> str:
        """The decoder in use, by its name in DECODERS."""
        return self._decoder.name

    def leaves(self, size: int) -> bool:
        """Whether images of this height and width are shown as they are stored."""
        return self._augment is AUGMENTS["none"] and self._recipe.val_resize is None and self._image_size == size

    def into(self, sample: Sample, uniforms_U: NDArray[np.float64], out_HWC: NDArray[np.uint8]) -> None:
        """Fill `out_HWC` (contiguous) with the view of `sample` that these random numbers in [0, 1) choose.

        Raises UnreadableImageError where the sample holds no whole image; `out_HWC` is then undefined.
        """
        self._augment.apply(StoredImage(sample, self._decoder), uniforms_U, out_HWC, self._recipe)
