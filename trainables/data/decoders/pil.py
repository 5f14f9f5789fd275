"""PIL for every image."""

from __future__ import annotations

from trainables.data.decoders.interface import Box, Decoded, JpegHeader


class Pil:
    """Leaves every file to the one that is asked where a decoder is not sure: PIL."""

    name = "pil"

    def decode(self, data: bytes | memoryview, header: JpegHeader, box: Box, shrink: int) -> Decoded | None:
        """See Decoder."""
        return None
