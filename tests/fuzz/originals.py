"""Whole images that are then damaged: every kind of JPEG, PNG and WebP that decoders treat in a way of its own."""

import math
import struct
import zlib
from collections.abc import Callable

import numpy as np
from PIL import Image

from tests.trainables.data.photos import encoded, photo
from trainables.data.decode import MAX_PIXELS

BOMB = 30_000, 30_000
_LARGE = 2**16 - 1  # the longest side of a JPEG image that its header can say
_STRIP = 65_500  # that libjpeg writes
_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # of a PNG color type
_BLOCK = 1 << 20


def originals() -> dict[str, bytes]:
    """Small images by format and kind."""
    image, wide = photo(1, 61, 47), photo(2, 230, 170)
    gray, alpha = image.convert("L"), image.convert("RGBA")
    alpha.putalpha(gray)
    exif = b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0" + encoded(photo(3, 16, 16), "JPEG")
    deep = Image.fromarray(np.linspace(0, 65535, 61 * 47).reshape(47, 61).astype(np.uint16))
    return {
        "jpeg": encoded(image, "JPEG"),
        "jpeg wide": encoded(wide, "JPEG", quality=85),
        "jpeg 4:4:4": encoded(image, "JPEG", subsampling=0, quality=95),
        "jpeg progressive": encoded(image, "JPEG", progressive=True),
        "jpeg progressive wide": encoded(wide, "JPEG", progressive=True, subsampling=0),
        "jpeg gray": encoded(gray, "JPEG"),
        "jpeg cmyk": encoded(image.convert("CMYK"), "JPEG"),
        "jpeg restarts": encoded(wide, "JPEG", restart_marker_blocks=3),
        "jpeg exif": encoded(image, "JPEG", exif=exif),
        "png": encoded(image, "PNG"),
        "png wide": encoded(wide, "PNG"),
        "png gray": encoded(gray, "PNG"),
        "png one bit": encoded(image.convert("1"), "PNG"),
        "png palette": encoded(image.quantize(16), "PNG", transparency=3),
        "png alpha": encoded(alpha, "PNG"),
        "png 16 bit": encoded(deep, "PNG"),
        "png interlaced": flat_png(61, 47, depth=16, color=6, interlaced=True),
        "webp": encoded(image, "WEBP"),
        "webp wide": encoded(wide, "WEBP"),
        "webp lossless": encoded(image, "WEBP", lossless=True),
        "webp alpha": encoded(alpha, "WEBP"),
        "webp animated": encoded(image, "WEBP", save_all=True, append_images=[photo(4, 61, 47)], duration=10),
    }


def with_size(data: bytes, width: int, height: int) -> bytes:
    """The same file with another size in its header; PNG's checksum is fixed."""
    mutated = bytearray(data)
    if data[:2] == b"\xff\xd8":
        at = max(data.find(b"\xff\xc0"), data.find(b"\xff\xc2"))
        struct.pack_into(">HH", mutated, at + 5, min(height, _LARGE), min(width, _LARGE))
    elif data[:4] == b"\x89PNG":
        struct.pack_into(">II", mutated, 16, width, height)
        struct.pack_into(">I", mutated, 29, zlib.crc32(mutated[12:29]))
    elif data[12:16] == b"VP8X":
        mutated[24:30] = struct.pack("<I", (width - 1) % 2**24)[:3] + struct.pack("<I", (height - 1) % 2**24)[:3]
    elif data[12:16] == b"VP8L":
        struct.pack_into("<I", mutated, 21, (width - 1) % 2**14 | (height - 1) % 2**14 << 14)
    else:
        struct.pack_into("<HH", mutated, 26, width % 2**14, height % 2**14)
    return bytes(mutated)


def sizes(noise: np.random.Generator) -> tuple[int, int]:
    """Sides that parsers stumble over."""
    edge = math.isqrt(MAX_PIXELS)
    sides = [0, 1, 2, 7, 8, 16, 17, 255, 256, 1000, edge - 1, edge, edge + 1, 16_383, 16_384, 30_000, _LARGE, 2**31 - 1]
    if noise.random() < 0.2:
        return BOMB
    width, height = (int(noise.choice(sides)) for _ in range(2))
    return width, height


def flat_png(width: int, height: int, *, depth: int = 8, color: int = 2, row_filter: int = 0, interlaced: bool = False) -> bytes:
    """A black PNG image, however large, in milliseconds: its stream is one compressed block, again and again."""
    parts = [(width, height)]
    if interlaced:  # seven smaller images
        steps = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))
        parts = [(-(-(width - x) // dx), -(-(height - y) // dy)) for x, y, dx, dy in steps]
    stream, checksum = [b"\x78\x01"], 1
    for columns, rows in parts:
        row = bytes([row_filter]) + bytes((columns * depth * _CHANNELS[color] + 7) // 8)
        rows_a_block = max(1, _BLOCK // len(row))
        for count in (rows_a_block, rows % rows_a_block):
            packer = zlib.compressobj(9, zlib.DEFLATED, -15)
            block, times = row * count, rows // rows_a_block if count == rows_a_block else 1
            stream.append((packer.compress(block) + packer.flush(zlib.Z_FULL_FLUSH)) * times)
            for _ in range(times):
                checksum = zlib.adler32(block, checksum)
    stream.append(zlib.compressobj(9, zlib.DEFLATED, -15).flush() + struct.pack(">I", checksum))
    header = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, interlaced)
    whole = (b"IHDR", header), (b"IDAT", b"".join(stream)), (b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*part) for part in whole)


def largest() -> dict[str, Callable[[], bytes]]:
    """The images that cost most: a little below the limit on pixels, or with 30,000 × 30,000 of them, by what they are."""
    side = math.isqrt(MAX_PIXELS)
    strip = _STRIP, MAX_PIXELS // _STRIP

    def solid(mode: str = "RGB", size: tuple[int, int] = (side, side)) -> Image.Image:
        return Image.new(mode, size)

    return {
        "jpeg largest": lambda: encoded(solid(), "JPEG"),
        "jpeg largest strip": lambda: encoded(solid(size=strip), "JPEG"),
        "jpeg largest 4:4:4": lambda: encoded(solid(), "JPEG", subsampling=0),
        "jpeg largest progressive": lambda: encoded(solid(), "JPEG", progressive=True),
        "jpeg largest gray": lambda: encoded(solid("L"), "JPEG"),
        "jpeg largest cmyk": lambda: encoded(solid("CMYK"), "JPEG"),
        "jpeg many scans": lambda: _with_scans(encoded(solid(size=(2000, 1500)), "JPEG", progressive=True), 600),
        "jpeg too many scans": lambda: _with_scans(encoded(solid(size=(2000, 1500)), "JPEG", progressive=True), 20_000),
        "jpeg largest, few bytes": lambda: with_size(encoded(photo(1), "JPEG"), side, side),
        "jpeg largest progressive, few bytes": lambda: with_size(encoded(photo(1), "JPEG", progressive=True), side, side),
        "jpeg bomb": lambda: with_size(encoded(solid(), "JPEG"), *BOMB),
        "png largest": lambda: flat_png(side, side),
        "png largest strip": lambda: flat_png(MAX_PIXELS, 1),
        "png largest alpha": lambda: flat_png(side, side, color=6, row_filter=4),
        "png largest one bit": lambda: flat_png(side, side, depth=1, color=0),
        "png largest 16 bit": lambda: flat_png(side, side, depth=16, row_filter=4),
        "png largest 16 bit alpha": lambda: flat_png(side, side, depth=16, color=6, row_filter=4),
        "png largest interlaced": lambda: flat_png(side, side, depth=16, color=6, row_filter=4, interlaced=True),
        "png bomb": lambda: flat_png(*BOMB),
        "png bomb one bit": lambda: flat_png(*BOMB, depth=1, color=0),
        "webp largest": lambda: encoded(solid(), "WEBP", method=0),
        "webp largest lossless": lambda: encoded(solid(), "WEBP", lossless=True, quality=0, method=0),
        "webp largest alpha": lambda: encoded(solid("RGBA"), "WEBP", method=0),
        "webp bomb": lambda: with_size(encoded(photo(1), "WEBP", lossless=True), 16_383, 16_383),
    }


def _with_scans(data: bytes, count: int) -> bytes:
    """A progressive JPEG file with its last scan again and again: each costs a pass over all coefficients."""
    at = data.rindex(b"\xff\xda")
    return data[:-2] + data[at:-2] * count + data[-2:]


def _chunk(name: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + name + content + struct.pack(">I", zlib.crc32(name + content))
