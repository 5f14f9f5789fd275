"""A JPEG file's quantised coefficients, and the file as libjpeg-turbo re-encodes them: sequential, one scan, no metadata.

By the TurboJPEG API's lossless transform and its custom filter. Functions and constants: turbojpeg.h of libjpeg-turbo 3.

Shapes: V × H blocks of a component, 64 coefficients of a block, rows first.
"""

import ctypes
import functools
from ctypes import CDLL, CFUNCTYPE, Structure, byref, c_int, c_size_t, c_void_p
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainables.data.decoders.turbojpeg import Region, find_library
from trainables.errors import DataError

_TRANSFORM = 2  # TJINIT_TRANSFORM
_COPY_NONE = 64  # TJXOPT_COPYNONE
_BLOCK = 8
_BLOCK_BYTES = _BLOCK * _BLOCK * 2


class Plane(NamedTuple):
    """A component's coefficients, up to the end of the last MCU; `height` and `width`: blocks that hold some of the picture."""

    blocks_VH64: NDArray[np.int16]
    height: int
    width: int


_Filter = CFUNCTYPE(c_int, c_void_p, Region, Region, c_int, c_int, c_void_p)


class _Transform(Structure):
    _fields_ = (("region", Region), ("op", c_int), ("options", c_int), ("data", c_void_p), ("filter", _Filter))


def transcode(data: bytes, across: list[int]) -> tuple[bytes, list[Plane]] | None:
    """The re-encoded file and its components' coefficients; None where the library cannot do that, or warns of damage.

    across: blocks of each component in a row of an MCU. Raises DataError where the library is not installed.
    """
    library = _library()
    rows: list[list[bytes]] = [[] for _ in across]
    sizes = [(0, 0)] * len(across)

    def collect(row: int, part: Region, plane: Region, component: int, number: int, transform: int) -> int:
        width = part.w // _BLOCK
        padded = -(-width // across[component]) * across[component]  # the library's own rows are as long
        rows[component].append(ctypes.string_at(row, padded * _BLOCK_BYTES))
        sizes[component] = plane.h // _BLOCK, width
        return 0

    handle = c_void_p(library.tj3Init(_TRANSFORM))
    if not handle:
        raise MemoryError("libjpeg-turbo has no memory for a transform")
    written, size = c_void_p(), c_size_t()
    try:
        transform = _Transform(options=_COPY_NONE, filter=_Filter(collect))
        if library.tj3Transform(handle, data, c_size_t(len(data)), 1, byref(written), byref(size), byref(transform)):
            return None
        content = ctypes.string_at(written.value or 0, size.value)
    finally:
        library.tj3Free(written)
        library.tj3Destroy(handle)
    shape = -1, _BLOCK * _BLOCK
    blocks = (np.frombuffer(b"".join(lines), dtype=np.int16).reshape(len(lines), *shape) for lines in rows)
    return content, [Plane(blocks_VH64, *real) for blocks_VH64, real in zip(blocks, sizes, strict=True)]


@functools.cache
def _library() -> CDLL:
    try:
        library = CDLL(find_library() or "libturbojpeg")
        library.tj3Init.restype = c_void_p
        library.tj3Transform  # noqa: B018  which older versions lack
    except (OSError, AttributeError):
        raise DataError("--tiles needs libjpeg-turbo 3: pip install turbojpeg, or install it by the system's packages") from None
    return library
