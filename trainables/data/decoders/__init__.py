"""The libraries that decode JPEG on the CPU: the first of DECODERS that is installed is used.

The order is that of measured speed: milliseconds of CPU for a RandomResizedCrop(224), linear resize included, of 167 ImageNet
files of 110 KB in the mean. Each gives PIL's pixels, bit for bit, where nothing is shrunk:

| decoder      | region | shrinks | ms   |
|--------------|--------|---------|------|
| turbojpeg    | yes    | yes     | 1.02 |
| simplejpeg   | no     | yes     | 1.22 |
| pil          | no     | no      | 1.74 |

Some 0.75 ms of it is Huffman decoding of what lies above and beside the crop too; of tiled files less. Images of CIFAR's
size: 25, 19 and 80 µs.
"""

import contextlib
from collections.abc import Callable

from trainables.data.decoders.interface import Box, Decoded, Decoder, JpegHeader


class Pil:
    """Decodes nothing itself: every file goes to the fallback of all decoders, PIL."""

    name = "pil"

    def decode(self, data: bytes | memoryview, header: JpegHeader, box: Box, shrink: int) -> Decoded | None:
        """See Decoder."""
        return None


def _turbojpeg() -> Decoder:
    from trainables.data.decoders.turbojpeg import TurboJpeg

    return TurboJpeg()


def _simplejpeg() -> Decoder:
    from trainables.data.decoders.simplejpeg import SimpleJpeg

    return SimpleJpeg()


DECODERS: dict[str, Callable[[], Decoder]] = {"turbojpeg": _turbojpeg, "simplejpeg": _simplejpeg, "pil": Pil}
"""Raise ImportError where the library is not installed."""


def open_decoder() -> Decoder:
    """The fastest decoder that is installed."""
    for open_one in DECODERS.values():
        with contextlib.suppress(ImportError):
            return open_one()
    raise AssertionError("PIL is a dependency")
