"""JPEG on the CPU: libjpeg-turbo 3 where it is installed, else PIL, which also judges each file that the other refuses.

Milliseconds of CPU for a RandomResizedCrop(224), resize included, with `data.fidelity: fast`, of JPEG files of

| decoder   | regions | 500 × 375 | 2000 × 1500 | 32 × 32, to 32 |
|-----------|---------|-----------|-------------|----------------|
| turbojpeg | yes     | 0.81      | 6.5         | 0.04           |
| pil       | no      | 1.36      | 9.1         | 0.14           |
"""

import functools
import logging
from collections.abc import Callable

from trainables.data.decoders.interface import Box, Decoded, Decoder, JpegHeader
from trainables.data.decoders.turbojpeg import TurboJpeg

_log = logging.getLogger("raydistill")


class Pil:
    """Decodes nothing itself: `StoredImage` gives PIL every file that its decoder does not take."""

    name = "pil"

    def decode(self, data: bytes | memoryview, header: JpegHeader, box: Box, shrink: int) -> Decoded | None:
        """See Decoder."""
        return None


DECODERS: dict[str, Callable[[], Decoder]] = {"turbojpeg": TurboJpeg, "pil": Pil}
"""Raise ImportError where the library is not installed."""


@functools.cache
def open_decoder() -> Decoder:
    """The fastest decoder that is installed; one for all, since to look for a library takes a while."""
    try:
        return TurboJpeg()
    except ImportError:
        _log.info("JPEG is decoded by PIL, which takes longer: libjpeg-turbo 3 is not installed (pip install turbojpeg)")
        return Pil()
