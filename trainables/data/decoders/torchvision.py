"""torchvision's decoder, which is always there: whole images."""

from __future__ import annotations

import numpy as np
import torch
from torchvision.io import ImageReadMode, decode_jpeg

from trainables.data.decoders.interface import Box, Decoded, JpegHeader


class Torchvision:
    """A binding without state."""

    name = "torchvision"

    def decode(self, data: bytes | memoryview, header: JpegHeader, box: Box, shrink: int) -> Decoded | None:
        """See Decoder. A truncated file is an error of the library and gives None."""
        encoded = torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy())  # torch warns of memory that is read-only
        try:
            image_CHW = decode_jpeg(encoded, mode=ImageReadMode.RGB, apply_exif_orientation=False)
        except RuntimeError:
            return None
        rgb_HWC = image_CHW.permute(1, 2, 0).numpy()
        return Decoded(rgb_HWC, 0, 0, 1) if rgb_HWC.shape == (header.height, header.width, 3) else None
