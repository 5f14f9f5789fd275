"""What becomes of an image as it is packed: nothing, a smaller JPEG, or pixels."""

import io
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from PIL import Image

from trainables.data.decode import Sample, decode_image, with_shorter_side
from trainables.data.pack.image_check import check_header


class Packed(NamedTuple):
    """An image as the record keeps it: a file, or height · width · 3 bytes of RGB."""

    content: bytes | memoryview
    width: int
    height: int


def described(mode: dict[str, int]) -> str:
    """A mode as options of `distill pack`."""
    return " ".join(f"--{name.replace('_', '-')} {value}" for name, value in mode.items()) or "as is"


@dataclass(frozen=True)
class Mode:
    """At most one of `max_side` and `raw` is set; none: the image stays as it is.

    max_side: a JPEG of `quality` whose longer side has at most so many pixels (bicubic, antialiased). A gray or RGB JPEG that is
    no larger keeps its bytes: another round of compression would only harm it.
    raw: pixels, the shorter side at most so many (bilinear, antialiased, as validation resizes: so that its view of the
    record equals its view of the original). Smaller images are not enlarged.
    """

    max_side: int | None = None
    quality: int = 90
    raw: int | None = None

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
        return {"max_side": self.max_side, "quality": self.quality} if self.max_side is not None else {}

    def __str__(self) -> str:
        return described(self.described())

    def apply(self, sample: Sample, pixels: bool) -> Packed:
        """The sample as a record keeps it, as pixels or as a file; see `stores_pixels`. Raises UnreadableImageError."""
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
