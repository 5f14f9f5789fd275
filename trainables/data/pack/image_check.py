"""Is this a whole image, and of what size: decided by a JPEG's or PNG's own structure where that leaves no doubt.

Decoding every image of a set takes a hundred times longer than copying it. Whatever this quick look does not accept is decoded,
and that decides.
"""

import io
from typing import NamedTuple

from PIL import Image

from trainables.data.decode import too_costly
from trainables.data.decoders.interface import read_header

_PNG, _PNG_END = b"\x89PNG\r\n\x1a\n", b"IEND\xaeB`\x82"


class HeaderCheck(NamedTuple):
    """An image's size in pixels as its header has it; EXIF orientation is not applied."""

    width: int
    height: int
    is_usual_jpeg: bool
    """Gray or of three colors."""


def check_header(content: bytes) -> HeaderCheck | None:
    """What a whole JPEG or PNG says of itself; None where only a decoder can tell.

    A JPEG is whole where it begins with its markers in order and ends with the one that ends it; a PNG where every chunk has
    its checksum.
    """
    if content.startswith(_PNG) and content.endswith(_PNG_END):
        try:
            with Image.open(io.BytesIO(content), formats=["PNG"]) as image:
                image.verify()
                return None if too_costly(*image.size, content, False) else HeaderCheck(*image.size, False)
        except Exception:  # damaged files make PIL's parsers raise almost anything
            return None
    header = read_header(content, channels=(1, 3, 4))
    if header is None or content.find(b"\xff\xda", header.at) < 0:
        return None
    if too_costly(header.width, header.height, content, header.progressive):
        return None
    return HeaderCheck(header.width, header.height, header.channels != 4)
