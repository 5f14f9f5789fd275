"""A stored sample to RGB pixels, exactly as `PIL.Image.open(file).convert("RGB")` gives them; gray of 16 bits is scaled to 8.

Shapes: H W pixels, of the image or of the part that is decoded.
"""

import errno
import functools
import io
import os
import warnings

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.TiffImagePlugin import TiffImageFile

from trainables.data.decoders import Pil
from trainables.data.decoders.interface import Box, Decoded, Decoder, JpegHeader, read_header

# PIL loads its plugins on first need, and threads that meet their first WebP at once could find the list half filled and
# call a good file unidentified. The common formats come first, since PIL tries its plugins in the order of their loading.
Image.preinit()
Image.init()
# Of metadata that is damaged, and of images that are large: each image that is left out has its reason, and no other matters.
warnings.filterwarnings("ignore", module=r"PIL\.")

Sample = bytes | memoryview | NDArray[np.uint8]
"""A stored sample: an encoded image file of any format that PIL reads, or RGB pixels (H, W, 3)."""


class UnreadableImageError(Exception):
    """A file that holds no whole image; its text is the reason in one phrase."""


_FILE_ERRNOS = frozenset(
    (errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENXIO)
)
"""What is wrong with a file itself. Others, EIO or ESTALE or ENOMEM, tell of a disk, a network or a machine, and may pass."""

MAX_PIXELS = 2 * 89_478_485
"""PIL refuses an image of more, which would take seconds and gigabytes."""
_MAX_PIXELS_PER_BYTE = 1024
"""Of a JPEG file, where 8 × 8 pixels take a bit or more, so that it has half as many at the most. What claims more would be
decoded as grey for the most part."""
_MAX_PIXELS_SCANNED = 2_000_000_000
"""A progressive JPEG file comes in some ten scans, and each of them, however few its bytes, goes over the whole image."""
_LONGEST_SIDE = 2**24
"""Of a line of 8 bytes a pixel PIL counts the bits in an int, and calls it a lack of memory where they are more."""
_JPEG, _SCAN = b"\xff\xd8", b"\xff\xda"
_LFS = b"version https://git-lfs"
_BOMB = (
    f"more than {MAX_PIXELS // 10**6} million pixels, PIL's limit against decompression bombs; make it smaller, "
    "if it is a JPEG by `distill pack --max-side`"
)
_BITS_PER_SAMPLE = 258  # a tag of TIFF


class StoredImage:
    """A sample of known size, of which parts can be decoded; a JPEG file is decoded no further than they need.

    Raises UnreadableImageError as `decode_image` does, for a JPEG file's pixels only when they are decoded.
    """

    def __init__(self, sample: Sample, decoder: Decoder) -> None:
        self._decoder = decoder
        self._file: tuple[bytes | memoryview, JpegHeader] | None = None
        if not isinstance(sample, np.ndarray):
            header = read_header(sample)
            if header is not None:
                self.width, self.height = header.width, header.height
                if reason := too_costly(self.width, self.height, sample, header.progressive):  # before any memory is taken
                    raise UnreadableImageError(reason)
                self._file = sample, header
                return
            sample = np.asarray(decode_image(sample))
        self._pixels_HWC = sample
        self.height, self.width = sample.shape[:2]

    def whole(self) -> NDArray[np.uint8]:
        """All pixels (H, W, 3). May be read-only memory."""
        return self.part((0, 0, self.width, self.height))

    def part(self, box: Box) -> NDArray[np.uint8]:
        """The pixels (H, W, 3) in `box`, which lies inside the image. May be read-only memory."""
        return self.decode(box).part(box)

    def decode(self, box: Box, shrink: int = 1) -> Decoded:
        """At least the pixels in `box`, of an image `shrink` times smaller where the decoder can do that; see Decoder."""
        if self._file is None:
            return Decoded(self._pixels_HWC, 0, 0, 1)
        data, header = self._file
        if decoded := self._decoder.decode(data, header, box, shrink):
            return decoded
        shrink = shrink if isinstance(self._decoder, Pil) else 1  # what another refuses is PIL's to judge, all of it
        pixels_HWC = np.asarray(decode_image(data, shrink=shrink))
        for shrunk in {shrink, 1}:  # PIL does not shrink a strip that is narrower than `shrink`
            if pixels_HWC.shape[:2] == (-(-header.height // shrunk), -(-header.width // shrunk)):
                return Decoded(pixels_HWC, 0, 0, shrunk)
        raise UnreadableImageError("truncated or damaged: two sizes")


def decode_image(sample: Sample, *, reduced: bool = False, shrink: int = 1) -> Image.Image:
    """The sample as an RGB image, pixels as by PIL's `convert("RGB")`.

    So alpha is dropped, palettes are looked up, CMYK is converted without a color profile, and EXIF rotation is not applied, as
    torchvision's ImageFolder does. Not so gray of 16 bits, which PIL clips at 255: 0 … 65535 become 0 … 255.

    shrink: a JPEG file comes 1, 2, 4 or 8 times smaller; reduced: one of more than MAX_PIXELS does, as little as it takes.
    Raises UnreadableImageError where the bytes are no image, are truncated or damaged, hold more than MAX_PIXELS, or numbers
    whose range is unknown.
    """
    if isinstance(sample, np.ndarray):
        return Image.fromarray(sample)
    if not len(sample):
        raise UnreadableImageError("empty file")
    try:
        with _open(sample, reduced) as image:
            if reduced and isinstance(image, JpegImageFile):
                shrink = next((by for by in (1, 2, 4) if image.width * image.height <= MAX_PIXELS * by**2), 8)
            if reason := too_costly(*image.size, sample, "progressive" in image.info, shrink):
                raise UnreadableImageError(reason)
            if shrink > 1:
                image.draft(None, (max(1, image.width // shrink), max(1, image.height // shrink)))
            return _to_rgb(image)
    except (MemoryError, UnreadableImageError):
        raise
    except UnidentifiedImageError:
        is_pointer = bytes(sample[: len(_LFS)]) == _LFS
        raise UnreadableImageError("a Git LFS pointer, run `git lfs pull`" if is_pointer else "not an image") from None
    except Image.DecompressionBombError:
        raise UnreadableImageError(_BOMB) from None
    except Exception as error:  # damaged files make PIL's parsers raise almost anything: SyntaxError, struct.error, KeyError
        raise UnreadableImageError(f"truncated or damaged: {_phrase(error)}") from None


def _open(sample: bytes | memoryview, reduced: bool) -> ImageFile:
    try:
        return Image.open(io.BytesIO(sample))
    except Image.DecompressionBombError:
        if not reduced or sample[:2] != _JPEG:
            raise
        return JpegImageFile(io.BytesIO(sample))


def _to_rgb(image: ImageFile) -> Image.Image:
    if not image.mode.startswith(("I", "F")):
        return image.convert("RGB")
    # PIL has 16 bits in a mode of their own, or in the one of 32: of PPM, which it scales to them, and before 10.3 of PNG
    if not image.mode.startswith("I;16") and not (image.mode == "I" and image.format in ("PNG", "PPM")):
        raise UnreadableImageError(f"values of PIL's mode {image.mode}, whose range is unknown; save it with 8 or 16 bits")
    image.load()
    bits = image.tag_v2.get(_BITS_PER_SAMPLE, (16,))[0] if isinstance(image, TiffImageFile) else 16
    return Image.fromarray(_to_8_bits(bits).take(np.asarray(image), mode="clip")).convert("RGB")


@functools.cache
def _to_8_bits(bits: int) -> NDArray[np.uint8]:
    """For each number of so many bits its part of 255."""
    highest = 2**bits - 1
    return np.asarray((np.arange(2**bits) * 255 + highest // 2) // highest, dtype=np.uint8)


def with_shorter_side(image: Image.Image, side: int) -> Image.Image:
    """The image resized (bilinear, antialiased) so that its shorter side has `side` pixels: torchvision's Resize, pixel by pixel.

    Raises UnreadableImageError for a strip so narrow that the result would have more than MAX_PIXELS.
    """
    width, height = image.size
    longer = int(side * max(width, height) / min(width, height))
    if side * longer > MAX_PIXELS:
        raise UnreadableImageError(f"a strip of {width} by {height} pixels, too narrow to resize")
    return image.resize((side, longer) if width <= height else (longer, side), Image.Resampling.BILINEAR)


def too_costly(width: int, height: int, encoded: bytes | memoryview, progressive: bool, shrink: int = 1) -> str | None:
    """Why an image of this size, as its header tells, is not decoded, `shrink` times smaller; None where it may be."""
    if width * height > MAX_PIXELS * shrink**2:
        return _BOMB
    if max(width, height) > _LONGEST_SIDE:
        return "longer or wider than PIL can decode"
    if encoded[:2] == _JPEG and width * height > _MAX_PIXELS_PER_BYTE * len(encoded):
        return "truncated or damaged: too few bytes for its size"
    if progressive and width * height * bytes(encoded).count(_SCAN) > _MAX_PIXELS_SCANNED:
        return "too many progressive scans for its size"
    return None


def read_file(path: str) -> bytes:
    """A file's bytes, in a third of the time that a file object takes to be made.

    Raises UnreadableImageError where the file is missing, forbidden or none; OSError, with its name, where disk or network fail.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe of an image's name would wait for ever
        try:
            size = os.fstat(file).st_size
            data = os.read(file, size or 1)  # a file object would ask for more, each time giving up the GIL
            while len(data) < size and (more := os.read(file, size - len(data))):
                data += more  # a read that ends early hides a failure that the next one tells
            return data
        finally:
            os.close(file)
    except OSError as error:
        if error.errno not in _FILE_ERRNOS:
            error.filename = path
            raise
        raise UnreadableImageError(f"cannot be read: {error.strerror}") from None


def _phrase(error: Exception) -> str:
    """The first line of an exception's text, or its type where it has none."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__
