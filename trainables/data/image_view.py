"""From a stored sample to the pixels that the models see: crop, decode what the crop needs, resize, flip.

With `data.decoder: gpu` or `dali` the crop alone is chosen here, for training's JPEG files; the device does the rest.

Shapes: B samples, U random numbers a sample, H=W=data.image_size pixels, C=3 channels.
"""

import numpy as np
from numpy.typing import NDArray

from trainables.config import DataConfig
from trainables.data.augment import AUGMENTS, Planned, ResizeOptions, crop_and_flip
from trainables.data.decode import Sample, StoredImage
from trainables.data.decoders import open_decoder
from trainables.data.decoders.interface import read_header
from trainables.data.encoded_rows import Region
from trainables.data.order import Split

_MOST_PIXELS = 2**24  # of an image that the device decodes: what is larger would take too much of its memory


class View:
    """How one split's samples become pixels. Safe from several threads at once."""

    def __init__(self, data: DataConfig, split: Split) -> None:
        training = split == "train"
        self._augment = AUGMENTS[data.augment if training else "none"]
        # what validation says is compared with published figures
        self._resize_options = ResizeOptions(data.val_resize, exact=not training or data.fidelity == "exact")
        self._image_size = data.image_size
        self.on_device = training and data.decodes_on_device
        """Whether `region` may find something to leave to the device."""
        self._decoder = open_decoder()
        self.decoder = data.decoder if self.on_device else self._decoder.name
        """The decoder in use, by its name in DECODERS or REGION_DECODERS."""
        self.num_uniforms = self._augment.num_uniforms

    def shows_unchanged(self, size: int | None) -> bool:
        """Whether `show` shows images of this height and width as they are stored. None: they differ."""
        val_resize = self._resize_options.val_resize
        return self._augment.plan is AUGMENTS["none"].plan and val_resize is None and self._image_size == size

    def region(self, row: int, sample: Sample, uniforms_U: NDArray[np.float64]) -> Region | None:
        """What the device is to show in `row` of a batch. None: for `plan` and `show`, no ordinary JPEG file or too large."""
        header = None if isinstance(sample, np.ndarray) else read_header(sample)
        if header is None or isinstance(sample, np.ndarray) or not header.ycbcr or header.width * header.height > _MOST_PIXELS:
            return None
        return Region(row, sample, header, *crop_and_flip(uniforms_U, header.width, header.height))

    def plan(self, sample: Sample, uniforms_U: NDArray[np.float64]) -> Planned:
        """The part of `sample` that these random numbers in [0, 1) choose.

        Raises UnreadableImageError where the sample holds no image.
        """
        return self._augment.plan(StoredImage(sample, self._decoder), uniforms_U, self._image_size, self._resize_options)

    def show(self, planned: Planned, out_HWC: NDArray[np.uint8]) -> None:
        """Decode what was planned into `out_HWC` (contiguous); `finish` comes next.

        Raises UnreadableImageError where the sample holds no whole image; `out_HWC` is then undefined.
        """
        self._augment.show(planned, out_HWC, self._resize_options)

    def finish(self, uniforms_BU: NDArray[np.float64], images_BHWC: NDArray[np.uint8]) -> None:
        """What is left to do to images that `show` has filled, with the same random numbers."""
        if self._augment.in_place:
            self._augment.in_place(uniforms_BU, images_BHWC)
