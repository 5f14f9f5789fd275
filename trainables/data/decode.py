"""Decode stored samples to RGB pixels exactly as `PIL.Image.open(file).convert("RGB")` does, but scale 16-bit gray to 8 bits.

Shapes: H W pixels of the image, or of the decoded part.
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

from trainables.data.jpeg import Box, Decoded, JpegHeader, read_header
from trainables.data.turbojpeg import TurboJpeg
from trainables.errors import first_line

# PIL loads its plugins lazily, and threads that open their first WebP at the same time could see a half-filled list and call a
# good file unidentified. `preinit` puts the common formats first, since PIL tries its plugins in loading order.
Image.preinit()
Image.init()
# PIL warns about damaged metadata and large images; every skipped image has a reason of its own, so these are noise.
warnings.filterwarnings("ignore", module=r"PIL\.")

Sample = bytes | memoryview | NDArray[np.uint8]
"""A stored sample: an encoded image in any format that PIL reads, or RGB pixels (H, W, 3)."""


class UnreadableImageError(Exception):
    """The sample is not a complete image; the message is the reason in one phrase."""


_FILE_ERRNOS = frozenset(
    (errno.ENOENT, errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENXIO)
)
"""Errors of the file itself. Others (EIO, ESTALE, ENOMEM) point to a disk, a network or a machine, and may pass."""

MAX_PIXELS = 2 * 89_478_485
"""PIL refuses larger images, which would take seconds and gigabytes."""
_MAX_PIXELS_PER_BYTE = 1024
"""Limit for a JPEG: 8 × 8 pixels take at least one bit, so that a real one has at most half as many. A file that claims more
would decode to mostly gray."""
_MAX_PIXELS_SCANNED = 2_000_000_000
"""Limit over all scans of a progressive JPEG: it has about ten, and each covers the whole image, however few its bytes."""
_LONGEST_SIDE = 2**24
"""PIL counts the bits of a line, at 8 bytes per pixel, in an int, and reports an overflow as out of memory."""
_JPEG, _SCAN = b"\xff\xd8", b"\xff\xda"
_TIFF = (b"II*\0", b"MM\0*")
_LFS = b"version https://git-lfs"
_BOMB = (
    f"more than {MAX_PIXELS // 10**6} million pixels, PIL's limit against decompression bombs; make it smaller, "
    "if it is a JPEG by `distill pack --max-side`"
)
_BITS_PER_SAMPLE = 258  # the TIFF tag


class StoredImage:
    """A sample of known size that can be decoded in part; `decoder` decodes a JPEG only as far as needed. None: PIL decodes it.

    Raises UnreadableImageError as `decode_image` does; for a JPEG's pixels, only when they are decoded.
    """

    def __init__(self, sample: Sample, decoder: TurboJpeg | None = None) -> None:
        self._decoder = decoder
        self._file: tuple[bytes | memoryview, JpegHeader] | None = None
        if not isinstance(sample, np.ndarray):
            header = read_header(sample)
            if header is not None:
                self.width, self.height = header.width, header.height
                if reason := too_costly(self.width, self.height, sample, header.progressive):  # before allocating memory
                    raise UnreadableImageError(reason)
                self._file = sample, header
                return
            sample = np.asarray(decode_image(sample))
        self._pixels_HWC = sample
        self.height, self.width = sample.shape[:2]

    def whole(self) -> NDArray[np.uint8]:
        """Return all pixels (H, W, 3), perhaps in read-only memory."""
        return self.part((0, 0, self.width, self.height))

    def part(self, box: Box) -> NDArray[np.uint8]:
        """Return the pixels (H, W, 3) in `box`, which must lie inside the image, perhaps in read-only memory."""
        return self.decode(box).part(box)

    def decode(self, box: Box, shrink: int = 1) -> Decoded:
        """Decode at least the pixels in `box`, `shrink` (1, 2, 4 or 8) times smaller if possible."""
        if self._file is None:
            return Decoded(self._pixels_HWC, 0, 0, 1)
        data, header = self._file
        if self._decoder:
            if decoded := self._decoder.decode(data, header, box, shrink):
                return decoded
            shrink = 1  # PIL decodes all of what libjpeg-turbo refuses
        pixels_HWC = np.asarray(decode_image(data, shrink=shrink))
        for shrunk in {shrink, 1}:  # PIL does not shrink a strip narrower than `shrink`
            if pixels_HWC.shape[:2] == (-(-header.height // shrunk), -(-header.width // shrunk)):
                return Decoded(pixels_HWC, 0, 0, shrunk)
        raise UnreadableImageError("truncated or damaged: two sizes")


def decode_image(sample: Sample, *, reduced: bool = False, shrink: int = 1) -> Image.Image:
    """Decode the sample to an RGB image, with the pixels of PIL's `convert("RGB")`.

    As in torchvision's ImageFolder, alpha is dropped, palettes are looked up, CMYK is converted without a color profile, and EXIF
    rotation is not applied. The exception is 16-bit gray, which PIL clips at 255: here 0 … 65535 become 0 … 255.

    `shrink` decodes a JPEG 1, 2, 4 or 8 times smaller; `reduced` shrinks one of more than MAX_PIXELS as little as possible.
    Raises UnreadableImageError if the bytes are not an image, are truncated or damaged, hold more than MAX_PIXELS, or have values
    of unknown range.
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
        head = bytes(sample[: len(_LFS)])
        reason = "a Git LFS pointer, run `git lfs pull`" if head == _LFS else "not an image"
        if head.startswith(_TIFF):
            reason = "a TIFF of channels that PIL does not read, save it as 8-bit RGB"
        raise UnreadableImageError(reason) from None
    except Image.DecompressionBombError:
        raise UnreadableImageError(_BOMB) from None
    except Exception as error:  # damaged files make PIL's parsers raise almost anything: SyntaxError, struct.error, KeyError
        raise UnreadableImageError(f"truncated or damaged: {first_line(error)}") from None


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
    # PIL stores 16 bits in I;16, or in the 32-bit mode I: for PPM, which it scales to 16 bits, and for PNG before 10.3
    if not image.mode.startswith("I;16") and not (image.mode == "I" and image.format in ("PNG", "PPM")):
        raise UnreadableImageError(f"values of PIL's mode {image.mode}, whose range is unknown; save it with 8 or 16 bits")
    image.load()
    bits = image.tag_v2.get(_BITS_PER_SAMPLE, (16,))[0] if isinstance(image, TiffImageFile) else 16
    return Image.fromarray(_to_8_bits(bits).take(np.asarray(image), mode="clip")).convert("RGB")


@functools.cache
def _to_8_bits(bits: int) -> NDArray[np.uint8]:
    """Return a table that scales each `bits`-bit value to [0, 255]."""
    highest = 2**bits - 1
    return np.asarray((np.arange(2**bits) * 255 + highest // 2) // highest, dtype=np.uint8)


def with_shorter_side(image: Image.Image, side: int) -> Image.Image:
    """Resize (bilinear, antialiased) so that the shorter side has `side` pixels; the pixels equal those of torchvision's Resize.

    Raises UnreadableImageError for a strip so narrow that the result would have more than MAX_PIXELS.
    """
    width, height = image.size
    longer = int(side * max(width, height) / min(width, height))
    if side * longer > MAX_PIXELS:
        raise UnreadableImageError(f"a strip of {width} by {height} pixels, too narrow to resize")
    return image.resize((side, longer) if width <= height else (longer, side), Image.Resampling.BILINEAR)


def too_costly(width: int, height: int, encoded: bytes | memoryview, progressive: bool, shrink: int = 1) -> str | None:
    """Return why an image with this header is too costly to decode `shrink` times smaller; None if it is not."""
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
    """Read a file in a third of the time that a file object takes.

    Raises UnreadableImageError if it is missing, forbidden or not a file; OSError, with its name, if disk or network fails.
    """
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # opening a pipe would block forever
        try:
            size = os.fstat(file).st_size
            data = os.read(file, size or 1)  # a file object would read more often, and give up the GIL each time
            while len(data) < size and (more := os.read(file, size - len(data))):
                data += more  # a short read may hide an error, which the next read raises
            return data
        finally:
            os.close(file)
    except OSError as error:
        if error.errno not in _FILE_ERRNOS:
            error.filename = path
            raise
        raise UnreadableImageError(f"cannot be read: {error.strerror}") from None
