"""Is this a whole image, and of what size: decided by a JPEG's or PNG's own structure where that leaves no doubt.

Decoding every image of a set takes a hundred times longer than copying it. Whatever this quick look does not accept is decoded,
and that decides.
"""

import struct
import zlib
from typing import NamedTuple

from trainables.data.decode import too_costly
from trainables.data.decoders.interface import read_header

_PNG_CHANNELS = {0: 1, 2: 3, 3: 3, 4: 2, 6: 4}


class HeaderCheck(NamedTuple):
    """An image's size in pixels as its header has it (EXIF orientation is not applied), and its colour channels."""

    width: int
    height: int
    channels: int
    format: str
    progressive: bool = False


def check_header(content: bytes) -> HeaderCheck | None:
    """What a whole JPEG or PNG says of itself; None where only a decoder can tell.

    A JPEG is whole where it begins with its markers in order and ends with the one that ends it; a PNG where every chunk has
    its checksum.
    """
    if content.startswith(b"\xff\xd8"):
        header = _jpeg(content)
    elif content.startswith(b"\x89PNG\r\n\x1a\n"):
        header = _png(content)
    else:
        return None
    if header is None or not header.width * header.height:
        return None
    return None if too_costly(header.width, header.height, content, header.progressive) else header


def _jpeg(content: bytes) -> HeaderCheck | None:
    header = read_header(content, channels=(1, 3, 4))
    if header is None or content.find(b"\xff\xda", header.at) < 0:
        return None
    return HeaderCheck(header.width, header.height, header.channels, "JPEG", header.progressive)


def _png(content: bytes) -> HeaderCheck | None:
    """The header chunk, where all chunks are whole (PNG specification, third edition, section 5)."""
    at, chunk_kinds = 8, []
    while at + 12 <= len(content):
        size, kind = struct.unpack_from(">I4s", content, at)
        body_end = at + 8 + size
        if body_end + 4 > len(content):
            return None
        if zlib.crc32(memoryview(content)[at + 4 : body_end]) != int.from_bytes(content[body_end : body_end + 4], "big"):
            return None
        chunk_kinds.append(kind)
        at = body_end + 4
        if kind == b"IEND":
            break
    if (
        len(chunk_kinds) < 3
        or chunk_kinds[0] != b"IHDR"
        or chunk_kinds[-1] != b"IEND"
        or b"IDAT" not in chunk_kinds
        or content[11] != 13
    ):
        return None
    width, height, _, colour = struct.unpack_from(">IIBB", content, 16)
    return HeaderCheck(width, height, _PNG_CHANNELS[colour], "PNG") if colour in _PNG_CHANNELS else None
