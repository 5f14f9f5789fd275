"""How images are converted when packed: not at all, to smaller JPEGs, or to pixels; and a quick check that one is complete.

Decoding every image of a set takes a hundred times longer than copying it. Only those that the check does not accept are decoded.
"""

import io
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from PIL import Image

from trainables.data.decode import Sample, decode_image, too_costly, with_shorter_side
from trainables.data.jpeg import read_header

_PNG, _PNG_END = b"\x89PNG\r\n\x1a\n", b"IEND\xaeB`\x82"


class Packed(NamedTuple):
    """An image as stored in a record: a file, or height · width · 3 bytes of RGB."""

    content: bytes | memoryview
    width: int
    height: int


class HeaderCheck(NamedTuple):
    """An image's size in pixels from its header; EXIF orientation is not applied."""

    width: int
    height: int
    is_usual_jpeg: bool
    """Whether it is a JPEG with one or three channels."""


def check_header(content: bytes) -> HeaderCheck | None:
    """Return the header of a complete JPEG or PNG; None if only a decoder can tell.

    A JPEG is complete if its markers are in order and it ends with the end marker; a PNG if all chunk checksums match.
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


def described(mode: dict[str, int]) -> str:
    """Format a mode as options of `distill pack`."""
    return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in mode.items()) or "as is"


@dataclass(frozen=True)
class Mode:
    """How to convert images. At most one of `max_side` and `raw` is set; with neither, images are unchanged.

    max_side: store a JPEG of `quality` whose longer side has at most this many pixels (bicubic, antialiased). A gray or RGB JPEG
    that is no larger keeps its bytes, since compressing it again would only harm it.
    raw: store pixels, with a shorter side of at most this many pixels (bilinear, antialiased, as in the validation view, which is
    then the same for the record and the original). Smaller images are not enlarged.
    """

    max_side: int | None = None
    quality: int = 90
    raw: int | None = None

    @property
    def shrinks(self) -> bool:
        """Whether images may be made smaller."""
        return self.max_side is not None or self.raw is not None

    def stores_pixels(self, source_has_pixels: bool) -> bool:
        """Whether the packed set stores pixels: because of the mode, or because the source has pixels."""
        return self.raw is not None or (source_has_pixels and self.max_side is None)

    def described(self) -> dict[str, int]:
        """Return the mode as stored in the index; {} if images are unchanged."""
        if self.raw is not None:
            return {"raw": self.raw}
        return {"max_side": self.max_side, "quality": self.quality} if self.max_side is not None else {}

    def __str__(self) -> str:
        return described(self.described())

    def apply(self, sample: Sample, pixels: bool) -> Packed:
        """Convert the sample for a record, to `pixels` (see `stores_pixels`) or a file. Raises UnreadableImageError."""
        if pixels:
            image = decode_image(sample, reduced=self.raw is not None)
            if self.raw is not None and min(image.size) > self.raw:
                image = with_shorter_side(image, self.raw)
            return Packed(image.tobytes(), *image.size)
        header = None if isinstance(sample, np.ndarray) else check_header(bytes(sample))
        if header and (self.max_side is None or (header.is_usual_jpeg and max(header[:2]) <= self.max_side)):
            return Packed(bytes(sample), header.width, header.height)
        image, buffer = decode_image(sample, reduced=self.max_side is not None), io.BytesIO()
        if self.max_side is None:
            return Packed(bytes(sample), *image.size)
        if max(image.size) > self.max_side:
            width, height = (max(1, round(side * self.max_side / max(image.size))) for side in image.size)
            image = image.resize((width, height), Image.Resampling.BICUBIC)
        image.save(buffer, "JPEG", quality=self.quality)
        return Packed(buffer.getvalue(), *image.size)
