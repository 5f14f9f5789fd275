"""What becomes of an image as it is packed: nothing, a smaller JPEG, or pixels."""

import io
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from PIL import Image

from trainables.data.decode import Sample, decode_image, with_shorter_side
from trainables.data.pack.image_check import check_header
from trainables.data.pack.tiling import has_pixels_of, tiled


class Packed(NamedTuple):
    """An image as the record keeps it: a file, or height · width · 3 bytes of RGB."""

    content: bytes | memoryview
    width: int
    height: int
    is_tiled: bool = False


def described(mode: dict[str, int]) -> str:
    """A mode as options of `distill pack`."""
    options = (f"--{name.replace('_', '-')}" + (f" {value}" if name != "tiles" else "") for name, value in mode.items())
    return " ".join(options) or "as is"


@dataclass(frozen=True)
class Mode:
    """At most one of `max_side` and `raw` is set; none: the image stays as it is.

    max_side: a JPEG of `quality` whose longer side has at most so many pixels (bicubic, antialiased). A gray or RGB JPEG that is
    no larger keeps its bytes: another round of compression would only harm it.
    raw: pixels, the shorter side at most so many (bilinear, antialiased, as validation resizes: so that its view of the
    record equals its view of the original). Smaller images are not enlarged.
    tiles: files become tiled ones, of the same pixels, where they can.
    """

    max_side: int | None = None
    quality: int = 90
    raw: int | None = None
    tiles: bool = False

    @property
    def shrinks(self) -> bool:
        """Whether images may become smaller."""
        return self.max_side is not None or self.raw is not None

    def stores_pixels(self, source_has_pixels: bool) -> bool:
        """Whether the set has pixels: by the mode, or because the source has them."""
        return self.raw is not None or (source_has_pixels and self.max_side is None)

    def described(self) -> dict[str, int]:
        """For the index; nothing where images stay as they are."""
        if self.raw is not None:
            return {"raw": self.raw}
        sides = {"max_side": self.max_side, "quality": self.quality} if self.max_side is not None else {}
        return sides | ({"tiles": 1} if self.tiles else {})

    def __str__(self) -> str:
        return described(self.described())

    def apply(self, sample: Sample, pixels: bool, *, check: bool = False) -> Packed:
        """The sample as a record keeps it, as pixels or as a file; see `stores_pixels`.

        check: a tiled file whose pixels are not those of the file it was made of is not taken. Raises UnreadableImageError;
        DataError where there is no library that makes tiles.
        """
        if pixels:
            return _pixels(sample, self.raw)
        packed = self._file(sample)
        if self.tiles and (content := tiled(bytes(packed.content))) and (not check or has_pixels_of(content, packed.content)):
            return packed._replace(content=content, is_tiled=True)
        return packed

    def _file(self, sample: Sample) -> Packed:
        if isinstance(sample, np.ndarray):
            return _encoded(decode_image(sample), self.max_side, self.quality)
        header = check_header(bytes(sample))
        if self.max_side is None:
            width, height = (header.width, header.height) if header else decode_image(sample).size
            return Packed(sample, width, height)
        if header and header.format == "JPEG" and header.channels != 4 and max(header.width, header.height) <= self.max_side:
            return Packed(sample, header.width, header.height)
        return _encoded(decode_image(sample, reduced=True), self.max_side, self.quality)


def _encoded(image: Image.Image, max_side: int | None, quality: int) -> Packed:
    """A JPEG whose longer side has at most `max_side` pixels; without that, a PNG, which loses nothing."""
    buffer = io.BytesIO()
    if max_side is None:
        image.save(buffer, "PNG")
    else:
        if max(image.size) > max_side:
            width, height = (max(1, round(side * max_side / max(image.size))) for side in image.size)
            image = image.resize((width, height), Image.Resampling.BICUBIC)
        image.save(buffer, "JPEG", quality=quality)
    return Packed(buffer.getvalue(), *image.size)


def _pixels(sample: Sample, shorter_side: int | None) -> Packed:
    """RGB pixels, the shorter side at most `shorter_side`."""
    image = decode_image(sample, reduced=shorter_side is not None)
    if shorter_side is not None and min(image.size) > shorter_side:
        image = with_shorter_side(image, shorter_side)
    return Packed(image.tobytes(), *image.size)
