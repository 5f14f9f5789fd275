"""simplejpeg (libjpeg-turbo inside): whole images, shrunk on request."""

import simplejpeg

from trainables.data.decoders.interface import Box, Decoded, JpegHeader


class SimpleJpeg:
    """A binding without state."""

    name = "simplejpeg"

    def decode(self, data: bytes | memoryview, header: JpegHeader, box: Box, shrink: int) -> Decoded | None:
        """See Decoder. `strict`: a warning of libjpeg, such as the end of a truncated file, gives None."""
        height, width = -(-header.height // shrink), -(-header.width // shrink)
        least = (height, width) if shrink > 1 else (0, 0)  # 0: not shrunk
        try:
            rgb_HWC = simplejpeg.decode_jpeg(data, "RGB", min_height=least[0], min_width=least[1], strict=True)
        except ValueError:
            return None
        return Decoded(rgb_HWC, 0, 0, shrink) if rgb_HWC.shape == (height, width, 3) else None
