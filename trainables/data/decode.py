"""A stored sample to RGB pixels, exactly as `PIL.Image.open(file).convert("RGB")` gives them. Shapes: H W pixels."""

from __future__ import annotations

import io

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

# PIL loads its plugins on first need, and threads that meet their first WebP at once could find the list half filled and
# call a good file unidentified. The common formats come first, since PIL tries its plugins in the order of their loading.
Image.preinit()
Image.init()

Sample = bytes | memoryview | NDArray[np.uint8]
"""What a source holds: an encoded image file of any format that PIL reads, or RGB pixels (H, W, 3)."""


class UnreadableImageError(Exception):
    """A file that holds no whole image; its text is the reason in one phrase."""


def decode_image(sample: Sample) -> Image.Image:
    """The sample as an RGB image, pixels as by PIL's `convert("RGB")`.

    So alpha is dropped, palettes are looked up, CMYK is converted without a colour profile, EXIF rotation is not applied,
    and 16-bit grayscale is clipped at 255, as torchvision's ImageFolder does.

    Raises UnreadableImageError where the bytes are no image, are truncated or damaged, or hold more pixels than PIL's limit
    against decompression bombs (2 · PIL.Image.MAX_IMAGE_PIXELS).
    """
    if isinstance(sample, np.ndarray):
        return Image.fromarray(sample)
    if not len(sample):
        raise UnreadableImageError("empty file")
    try:
        with Image.open(io.BytesIO(sample)) as image:
            return image.convert("RGB")
    except MemoryError:
        raise
    except UnidentifiedImageError:
        raise UnreadableImageError("not an image") from None
    except Image.DecompressionBombError:
        raise UnreadableImageError("more pixels than PIL's limit against decompression bombs") from None
    except Exception as error:  # damaged files make PIL's parsers raise almost anything: SyntaxError, struct.error, KeyError
        raise UnreadableImageError(f"truncated or damaged: {_phrase(error)}") from None


def read_file(path: str) -> bytes:
    """A file's bytes. Raises UnreadableImageError where it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise UnreadableImageError(f"cannot be read: {error.strerror or _phrase(error)}") from None


def _phrase(error: Exception) -> str:
    """The first line of an exception's text, or its type where it has none."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__
