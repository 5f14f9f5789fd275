"""JPEG by libjpeg-turbo 3 through its TurboJPEG API: a part of an image, shrunk on request. Without it, PIL decodes.

Milliseconds of CPU for a RandomResizedCrop(224), resize included, with `data.fidelity: fast`, of JPEG files of

| decoder   | 500 × 375 | 2000 × 1500 | 32 × 32, to 32 |
|-----------|-----------|-------------|----------------|
| turbojpeg | 0.81      | 6.5         | 0.04           |
| PIL       | 1.36      | 9.1         | 0.14           |

The library lies in the wheel `turbojpeg`, whose own Python module, which knows no regions, is not imported; else the system's
is taken, from version 3.0 on. Functions and constants: turbojpeg.h of libjpeg-turbo 3.

TJPARAM_FASTUPSAMPLE, 4% faster, is not used: together with a cropping region, version 3.0 writes outside its memory.
"""

import ctypes
import ctypes.util
import functools
import importlib.metadata
import logging
import threading
from collections.abc import Callable
from ctypes import CDLL, PyDLL, Structure, addressof, c_char, c_int, c_size_t, c_void_p

import numpy as np

from trainables.data.jpeg import Box, Decoded, JpegHeader

_DECOMPRESS = 1  # TJINIT_DECOMPRESS
_WIDTH, _HEIGHT = 5, 6  # TJPARAM_JPEGWIDTH, TJPARAM_JPEGHEIGHT
_RGB = 0  # TJPF_RGB
_MARGIN = 2
"""Smooth chroma upsampling looks at a neighbour's pixels, which it does not find at the edge of a region."""
_log = logging.getLogger("raydistill")


class _Region(Structure):
    """tjregion."""

    _fields_ = (("x", c_int), ("y", c_int), ("w", c_int), ("h", c_int))


class _Scale(Structure):
    _fields_ = (("num", c_int), ("denom", c_int))


_SCALES = {shrink: _Scale(1, shrink) for shrink in (1, 2, 4, 8)}


class TurboJpeg:
    """Decodes from any number of threads at once, without the GIL. Raises ImportError where no libjpeg-turbo 3 is found."""

    def __init__(self) -> None:
        self._library, self._decompress = _open_library()
        self._handles = threading.local()

    def decode(self, data: bytes | memoryview, header: JpegHeader, box: Box, shrink: int) -> Decoded | None:
        """At least the pixels in `box`, of the image shrunk by 1, 2, 4 or 8 in the frequency domain; nothing below the box.

        Unshrunk pixels in the box are those of PIL. None where the library fails or warns, such as of a bad code: PIL is used
        then, and its result is final.
        """
        handle = getattr(self._handles, "handle", None) or _Handle(self._library)
        decoded = self._decode(handle.pointer, data, header, box, shrink)
        # what an error leaves behind may spoil the next image
        self._handles.handle = None if decoded is None else handle
        return decoded

    def _decode(self, handle: int, data: bytes | memoryview, header: JpegHeader, box: Box, shrink: int) -> Decoded | None:
        library = self._library
        # ctypes takes the address of bytes itself, which is faster, and matters for the small images of CIFAR
        encoded = data if isinstance(data, bytes) else np.frombuffer(data, dtype=np.uint8).ctypes.data
        if library.tj3DecompressHeader(handle, encoded, len(data)):
            return None
        if (library.tj3Get(handle, _WIDTH), library.tj3Get(handle, _HEIGHT)) != (header.width, header.height):
            return None
        step = max(1, header.mcu_width // shrink)
        left = max(0, box[0] // shrink - _MARGIN) // step * step
        top = max(0, box[1] // shrink - _MARGIN)
        width = min(-(-header.width // shrink), -(-box[2] // shrink) + _MARGIN) - left
        height = min(-(-header.height // shrink), -(-box[3] // shrink) + _MARGIN) - top
        rgb_HWC = np.empty((height, width, 3), dtype=np.uint8)
        if (
            library.tj3SetScalingFactor(handle, _SCALES[shrink])
            or library.tj3SetCroppingRegion(handle, _Region(left, top, width, height))
            or self._decompress(handle, encoded, len(data), addressof(c_char.from_buffer(rgb_HWC.data)), 0, _RGB)
        ):
            return None
        return Decoded(rgb_HWC, left, top, shrink)


class _Handle:
    """A decompressor, freed with the thread that it belongs to."""

    def __init__(self, library: PyDLL) -> None:
        self._destroy = library.tj3Destroy
        self.pointer: int = library.tj3Init(_DECOMPRESS)
        if not self.pointer:
            raise MemoryError("libjpeg-turbo has no memory for a decompressor")

    def __del__(self) -> None:
        self._destroy(self.pointer)


def _open_library() -> tuple[PyDLL, Callable[[int, int | bytes, int, int, int, int], int]]:
    """The library, whose short calls keep the GIL, and tj3Decompress8, which works without it.

    A thread that gives the GIL up has to wait for it again: with a call of a microsecond that is a loss.
    Raises ImportError where there is none, or none with regions.
    """
    path = find_library()
    if path is None:
        raise ImportError("neither the wheel nor a system library is there")
    try:
        library, decompress = PyDLL(path), CDLL(path).tj3Decompress8
        signatures = (
            (library.tj3Init, c_void_p, (c_int,)),
            (library.tj3Destroy, None, (c_void_p,)),
            (library.tj3DecompressHeader, c_int, (c_void_p, c_void_p, c_size_t)),
            (library.tj3Get, c_int, (c_void_p, c_int)),
            (library.tj3SetScalingFactor, c_int, (c_void_p, _Scale)),
            (library.tj3SetCroppingRegion, c_int, (c_void_p, _Region)),
            (decompress, c_int, (c_void_p, c_void_p, c_size_t, c_void_p, c_int, c_int)),
        )
    except (OSError, AttributeError) as error:
        raise ImportError(f"{path} is no libjpeg-turbo 3: {error}") from None
    for function, result, arguments in signatures:
        function.restype, function.argtypes = result, arguments
    return library, decompress


@functools.cache
def open_decoder() -> TurboJpeg | None:
    """The decoder if it is installed; None: PIL decodes. One for all, since to look for a library takes a while."""
    try:
        return TurboJpeg()
    except ImportError:
        _log.info("JPEG is decoded by PIL, which takes longer: libjpeg-turbo 3 is not installed (pip install turbojpeg)")
        return None


def find_library() -> str | None:
    try:
        files = importlib.metadata.files("turbojpeg") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.name.startswith("libturbojpeg"):
            return str(file.locate())
    return ctypes.util.find_library("turbojpeg")
