"""The header of a JPEG file, and parts of images. Shapes: H W pixels of the part that was decoded."""

import struct
from collections.abc import Container
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Box = tuple[int, int, int, int]
"""(left, top, right, bottom) in pixels of the whole image; right and bottom lie just outside."""

_START, _END = b"\xff\xd8", b"\xff\xd9"
_FRAMES = frozenset((0xC0, 0xC1, 0xC2))  # baseline, extended, progressive: Huffman-coded, in blocks
_PROGRESSIVE = 0xC2
_OTHER_FRAMES = frozenset(range(0xC3, 0xD0)) - {0xC4, 0xC8, 0xCC}  # lossless, hierarchical, arithmetic
_WITHOUT_LENGTH = frozenset((0x01, *range(0xD0, 0xD8)))
_SCAN, _END_MARKER = 0xDA, 0xD9
_ADOBE = 0xEE
_BYTE_SIZED, _MAX_SAMPLES = 8, 4


class JpegHeader(NamedTuple):
    """What is known of a JPEG file before it is decoded."""

    width: int
    height: int
    channels: int
    mcu_width: int  # a region can begin at multiples of it
    ycbcr: bool  # it is gray, or holds YCbCr, as nearly all do; some hold RGB, which not every decoder looks for
    progressive: bool
    at: int  # where the frame header begins


class Region(NamedTuple):
    """A row of a batch that is left to the device: the `box` of a JPEG to decode, resize and, with `flip`, mirror."""

    row: int
    data: bytes | memoryview
    header: JpegHeader
    box: Box
    flip: bool


class Decoded(NamedTuple):
    """A part of an image that was shrunk by `shrink`, whose first pixel is at (left, top) of the shrunk image."""

    rgb_HWC: NDArray[np.uint8]
    left: int
    top: int
    shrink: int

    def part(self, box: Box) -> NDArray[np.uint8]:
        """The pixels in `box`, where nothing was shrunk."""
        left, top, right, bottom = box
        return self.rgb_HWC[top - self.top : bottom - self.top, left - self.left : right - self.left]


def read_header(data: bytes | memoryview, channels: Container[int] = (1, 3)) -> JpegHeader | None:
    """The header of an ordinary JPEG file: Huffman-coded, 8 bits, grayscale or of three colors. None for all others.

    So CMYK (of 4 `channels`), lossless and 12-bit JPEG, other formats and damaged headers are left to PIL, and so is a file that
    does not end as a JPEG file does: decoders that stop below a crop would not see that it is truncated. Markers: ITU-T T.81,
    annex B.
    """
    if data[:2] != _START or data[-2:] != _END:
        return None
    at, end, adobe = 2, len(data) - 9, 0
    while at < end:
        if data[at] != 0xFF:
            return None
        marker = data[at + 1]
        if marker == 0xFF:  # a fill byte
            at += 1
        elif marker in _FRAMES:
            header = _read_frame(data, at + 4, adobe, marker == _PROGRESSIVE)
            return header if header and header.channels in channels else None
        elif marker in _OTHER_FRAMES or marker in (_SCAN, _END_MARKER):
            return None
        elif marker in _WITHOUT_LENGTH:
            at += 2
        else:
            if marker == _ADOBE:
                adobe = at + 4
            at += 2 + (data[at + 2] << 8 | data[at + 3])
    return None


def _read_frame(data: bytes | memoryview, at: int, adobe: int, progressive: bool) -> JpegHeader | None:
    bits, height, width, components = struct.unpack_from(">BHHB", data, at)
    if bits != _BYTE_SIZED or not width or not height or not components or at + 6 + 3 * components > len(data):
        return None
    widest = max(data[at + 7 + 3 * component] >> 4 for component in range(components))
    if not 1 <= widest <= _MAX_SAMPLES:
        return None
    # Adobe's marker ends with the transform, 0 for none; without it, the components may be called R, G, B
    rgb = components == 3 and ((adobe and not data[adobe + 11]) or bytes(data[at + 6 : at + 15 : 3]) == b"RGB")
    return JpegHeader(width, height, components, 8 * widest if components > 1 else 8, not rgb, progressive, at)
