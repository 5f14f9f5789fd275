"""Is this a whole image, and of what size: told from a JPEG's or PNG's own structure where that leaves no doubt.

Decoding every image of a set takes a hundred times longer than copying it. Whatever this quick look does not accept is decoded,
and that decides.
"""

from __future__ import annotations

import struct
import zlib
from typing import NamedTuple

from trainables.data.decode import too_costly
from trainables.data.decoders.contract import read_header

_PNG_COLOURS = frozenset((0, 2, 3, 4, 6))


class Look(NamedTuple):
    """An image's size in pixels as its header has it (EXIF orientation is not applied)."""

    width: int
    height: int
    format: str


def quick_look(content: bytes) -> Look | None:
    """What a whole JPEG or PNG says of itself; None where only a decoder can tell.

    A JPEG is whole where it begins with its markers in order and ends with the one that ends it; CMYK and other rare ones are for
    the decoder to judge. A PNG is whole where every chunk has its checksum.
    """
    if content.startswith(b"\xff\xd8"):
        look = _jpeg(content)
    elif content.startswith(b"\x89PNG\r\n\x1a\n"):
        look = _png(content)
    else:
        return None
    if look is None or not look.width * look.height or too_costly(look.width, look.height, content):
        return None
    return look


def _jpeg(content: bytes) -> Look | None:
    """What the header says that the decoders go by; a scan has to follow it."""
    header = read_header(content)
    return Look(header.width, header.height, "JPEG") if header and content.find(b"\xff\xda") > 0 else None


def _png(content: bytes) -> Look | None:
    """The header chunk, where all chunks are whole (PNG specification, third edition, section 5)."""
    at, seen = 8, []
    while at + 12 <= len(content):
        size, kind = struct.unpack_from(">I4s", content, at)
        body_end = at + 8 + size
        if body_end + 4 > len(content):
            return None
        if zlib.crc32(memoryview(content)[at + 4 : body_end]) != int.from_bytes(content[body_end : body_end + 4], "big"):
            return None
        seen.append(kind)
        at = body_end + 4
        if kind == b"IEND":
            break
    if len(seen) < 3 or seen[0] != b"IHDR" or seen[-1] != b"IEND" or b"IDAT" not in seen or content[11] != 13:
        return None
    width, height, _, colour = struct.unpack_from(">IIBB", content, 16)
    return Look(width, height, "PNG") if colour in _PNG_COLOURS else None
