"""nvImageCodec's CPU decoder (libjpeg-turbo inside): decodes a part of an image, and stops below it. No GPU is touched."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from nvidia import nvimgcodec

from trainables.data.decoders.interface import Box, Decoded, JpegHeader

_AS_PIL = ":fancy_upsampling=1 :fast_idct=0"


class NvImageCodec:
    """One decoder a thread, each without threads of its own."""

    name = "nvimagecodec"

    def __init__(self) -> None:
        # it would turn images by their EXIF orientation, which torchvision's ImageFolder does not
        self._params = nvimgcodec.DecodeParams(apply_exif_orientation=False, color_spec=nvimgcodec.ColorSpec.SRGB)
        self._decoders = threading.local()

    def decode(self, data: bytes | memoryview, header: JpegHeader, box: Box, shrink: int) -> Decoded | None:
        """See Decoder. Decodes nothing below the box."""
        left, top, right, bottom = box
        try:
            stream = nvimgcodec.CodeStream(np.frombuffer(data, dtype=np.uint8))
            if (stream.height, stream.width) != (header.height, header.width):
                return None
            part = stream.get_sub_code_stream(region=nvimgcodec.Region(top, left, bottom, right))
            image = self._decoder().decode(part, params=self._params)
        except (RuntimeError, ValueError):
            return None
        if image is None:
            return None
        rgb_HWC = np.asarray(image)
        if rgb_HWC.shape != (bottom - top, right - left, 3):
            return None
        return Decoded(rgb_HWC, left, top, 1)

    def _decoder(self) -> Any:
        if not hasattr(self._decoders, "decoder"):
            self._decoders.decoder = nvimgcodec.Decoder(
                device_id=nvimgcodec.NVIMGCODEC_DEVICE_CPU_ONLY,
                max_num_cpu_threads=1,
                backends=[nvimgcodec.Backend(nvimgcodec.BackendKind.CPU_ONLY)],
                options=_AS_PIL,
            )
        return self._decoders.decoder
