"""JPEG on the CPU: libjpeg-turbo 3 where it is installed, else PIL, which also decides on each file that the other refuses.

Microseconds of CPU for a RandomResizedCrop(224) of JPEG files, resize included, `fidelity: fast`; TABLE
"""

import functools
from collections.abc import Callable

from trainables.data.decoders.interface import Box, Decoded, Decoder, JpegHeader
from trainables.data.decoders.turbojpeg import TurboJpeg


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
        return Pil()
