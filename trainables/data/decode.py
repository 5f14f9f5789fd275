"""Encoded bytes to RGB pixels, exactly as `PIL.Image.open(file).convert("RGB")` gives them."""

from __future__ import annotations

import io

from PIL import Image, UnidentifiedImageError

# PIL loads its plugins on first need, and threads that meet their first WebP at once could find the list half filled and
# call a good file unidentified. The common formats come first, since PIL tries its plugins in the order of their loading.
Image.preinit()
Image.init()


class UnreadableImageError(Exception):
    """A file that holds no whole image; its text is the reason in one phrase."""


def decode_image(encoded: bytes) -> Image.Image:
    """The RGB image in the bytes of a file of any format that PIL reads, pixels as by PIL's `convert("RGB")`.

    So alpha is dropped, palettes are looked up, CMYK is converted without a colour profile, EXIF rotation is not applied,
    and 16-bit grayscale is clipped at 255, as torchvision's ImageFolder does.

    Raises UnreadableImageError where the bytes are no image, are truncated or damaged, or hold more pixels than PIL's limit
    against decompression bombs (2 · PIL.Image.MAX_IMAGE_PIXELS).
    """
    if not encoded:
        raise UnreadableImageError("empty file")
    try:
        with Image.open(io.BytesIO(encoded)) as image:
            return image.convert("RGB")
    except MemoryError:
        raise
    except UnidentifiedImageError:
        raise UnreadableImageError("not an image") from None
    except Image.DecompressionBombError:
        raise UnreadableImageError("more pixels than PIL's limit against decompression bombs") from None
    except Exception as error:  # damaged files make PIL's parsers raise almost anything: SyntaxError, struct.error, KeyError
        raise UnreadableImageError(f"truncated or damaged: {_phrase(error)}") from None


def read_image(path: str) -> Image.Image:
    """`decode_image` of a file. Raises UnreadableImageError also where the file cannot be read."""
    try:
        with open(path, "rb") as file:
            encoded = file.read()
    except OSError as error:
        raise UnreadableImageError(f"cannot be read: {error.strerror or _phrase(error)}") from None
    return decode_image(encoded)


def _phrase(error: Exception) -> str:
    """The first line of an exception's text, or its type where it has none."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__
