"""PIL for every image."""

from __future__ import annotations

from trainables.data.decoders.interface import Box, Decoded, JpegHeader


class Pil:
    """Decodes nothing itself: every file goes to the fallback of all decoders, PIL."""

    name = "pil"

    def decode(self, data: bytes | memoryview, header: JpegHeader, box: Box, shrink: int) -> Decoded | None:
        """See Decoder."""
        return None
