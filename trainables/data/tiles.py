"""Tiled JPEG files: a crop is decoded from the codes that it needs, not from all that lie above and to the left of it too.

A tiled file is an ordinary JPEG file, which any decoder opens. A segment of its own (APP11) has a map of entry points into the
scan: one for each tile, which is a run of MCUs in one row. An entry point has a prefix and a suffix. The prefix codes a flat
MCU that leads to it from a whole byte and a DC prediction of 0; the suffix codes one that leads from it back to these. With them,
runs of several rows are joined to a smaller file. Its pixels are those of the whole file, but for two columns of flat MCUs at its
left or right, or a row of them at its top.

Restart markers would do the same, but with them libjpeg-turbo takes its slower Huffman decoder, which takes most of the gain.
"""

import struct
import zlib
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainables.data.decoders.interface import Box, Decoded, JpegHeader

ENTRY_POINT = np.dtype([("end", ">u4"), ("begin", ">u4"), ("codes", ">u2"), ("suffix", "u1"), ("prefix", "u1")])
"""Offsets into the scan: the end of the whole bytes before it, and the first whole byte after it. Then where its own codes begin,
counted from those of the first, and the bytes of its suffix, which comes first, and of its prefix."""

_BEGINS, _ENDS = struct.Struct(">4xIHBB"), struct.Struct(">I4xHBx")
"""What is read of entry points where codes begin (begin, codes, suffix, prefix), and where they end (end, codes, suffix)."""
_SEGMENT, _NAME = b"\xff\xd8\xff\xeb", b"rdtiles1"
_CRC = struct.Struct(">I")  # of all that follows it up to the scan
_FIELDS = struct.Struct(">IIHBB")  # bytes of the file, offset of the scan, MCUs of a tile, an MCU's height, bytes of a flat MCU
_NAME_AT = len(_SEGMENT) + 2
_CRC_AT = _NAME_AT + len(_NAME)
_FIELDS_AT = _CRC_AT + _CRC.size
_FLAT_AT = _FIELDS_AT + _FIELDS.size
_LONGEST_SEGMENT = 2**16 - 1
_LONGEST_SIDE = 65_500  # of an image that libjpeg decodes
_SIZE_IN_FRAME = 1  # where a frame header has height and width
_END = b"\xff\xd9"
_FLAT_COLUMNS = 2
_MARGIN = 4
"""Pixels: decoders take 2 more than the box, and smooth upsampling of chroma looks at another 2."""
_SLACK = bytes(4096)
"""What follows a cut: libjpeg-turbo takes its slower Huffman decoder where fewer than 512 bytes a block are left."""


class Cut(NamedTuple):
    """A part of a tiled file, as a file; its first pixel is at (left, top) of the whole, which may be outside."""

    data: bytes
    header: JpegHeader
    left: int
    top: int
    real: Box
    """The pixels that are those of the whole."""

    def box(self, box: Box) -> Box:
        """A box of the whole, in this file."""
        return box[0] - self.left, box[1] - self.top, box[2] - self.left, box[3] - self.top

    def in_whole(self, decoded: Decoded) -> Decoded:
        """What was decoded of this file, as a part of the whole."""
        rgb_HWC, left, top, shrink = decoded
        real_left, real_top = max(self.real[0] // shrink, left), max(self.real[1] // shrink, top)
        real_right = -(-self.real[2] // shrink)
        real_HWC = rgb_HWC[real_top - top :, real_left - left : real_right - left]
        return Decoded(real_HWC, real_left + self.left // shrink, real_top + self.top // shrink, shrink)


class Tiles:
    """The map of a tiled file."""

    def __init__(self, data: bytes | memoryview, header: JpegHeader) -> None:
        """Raises ValueError where the map, or another part of what comes before the scan, is damaged."""
        self._data, self._header = data, header
        try:
            (crc,) = _CRC.unpack_from(data, _CRC_AT)
            num_bytes, self._scan, self._interval, self._mcu_height, flat = _FIELDS.unpack_from(data, _FIELDS_AT)
        except struct.error:
            raise ValueError("cut off") from None
        if num_bytes != len(data) or zlib.crc32(data[_FIELDS_AT : self._scan]) != crc:
            raise ValueError("another checksum")
        if not self._mcu_height or not self._interval or not fits(header, self._mcu_height):
            raise ValueError("impossible sizes")
        self._num_rows = -(-header.height // self._mcu_height)
        self._num_tiles = -(-header.width // (header.mcu_width * self._interval))
        num_points, points_at = self._num_rows * self._num_tiles, _FLAT_AT + flat
        self._codes = points_at + num_points * ENTRY_POINT.itemsize
        if self._codes > len(data):
            raise ValueError("impossible sizes")
        self._flat = bytes(data[_FLAT_AT:points_at])
        # row by row
        self._points: NDArray[np.void] = np.ndarray((num_points,), ENTRY_POINT, data, points_at)

    def cut(self, box: Box, shrink: int) -> Cut:
        """The part that a decoder needs for the pixels in `box`, of the image shrunk by 1, 2, 4 or 8."""
        header, margin, num_rows, num_tiles = self._header, _MARGIN * shrink, self._num_rows, self._num_tiles
        mcu_width, mcu_height, tile_width = header.mcu_width, self._mcu_height, header.mcu_width * self._interval
        left, right = max(0, box[0] - margin) // tile_width, min(num_tiles, -(-(box[2] + margin) // tile_width))
        top, bottom = max(0, box[1] - margin) // mcu_height, min(num_rows, -(-(box[3] + margin) // mcu_height))
        # not at the left edge of the picture, whose pixels they would change
        flat_left = _FLAT_COLUMNS if left else 0
        flat_right = _FLAT_COLUMNS if not left and right < num_tiles else 0
        flat_top = 1 if not left and top else 0
        x, y = left * tile_width, top * mcu_height
        real_x, real_y = flat_left * mcu_width, flat_top * mcu_height
        real_right, height = (
            real_x + min(header.width, right * tile_width) - x,
            real_y + min(header.height, bottom * mcu_height) - y,
        )
        width = real_right + flat_right * mcu_width
        num_flat = 1 if flat_left else flat_top * -(-width // mcu_width) - 1
        head, frame = self._head(width, height)
        # of whole rows the codes stand together
        num_runs = bottom - top if flat_left or flat_right else 1
        codes = self._join(top * num_tiles + left, (bottom - num_runs) * num_tiles + right, num_runs, num_flat, bool(flat_right))
        return Cut(
            b"".join((head, *codes, _END, _SLACK)),
            JpegHeader(width, height, header.channels, mcu_width, header.ycbcr, header.progressive, frame),
            x - real_x,
            y - real_y,
            (real_x, real_y, real_right, height),
        )

    def _join(self, first: int, end: int, num_runs: int, num_flat: int, flat_right: bool) -> list[bytes | memoryview]:
        """Join `num_runs` runs of tiles, one per row of MCUs, or one of several whole rows, whose codes stand together.

        `first` and `end` index `self._points`: where the first run begins and ends; run i is i · num_tiles later. Between two
        runs stand the suffix of the one and the prefix of the next.

        `num_flat` flat MCUs come first; where it is -1 the codes begin with the scan.
        """
        # a view: runs are copied once, when all is joined
        scan, codes, num_tiles = memoryview(self._data)[self._scan :], self._data[self._codes : self._scan], self._num_tiles
        last = end + (num_runs - 1) * num_tiles
        begins = _BEGINS.iter_unpack(self._points[first : first + (num_runs - 1) * num_tiles + 1 : num_tiles].tobytes())
        ends = _ENDS.iter_unpack(self._points[end:last:num_tiles].tobytes())
        at, codes_at, skipped_bytes, prefix_bytes = next(begins)
        prefix_at = codes_at + skipped_bytes
        joined = [] if num_flat < 0 else [self._flat * num_flat, codes[prefix_at : prefix_at + prefix_bytes]]
        # Inlined: a call per row makes this 1.5 times slower.
        for (stop, suffix_at, suffix_bytes), (begin, codes_at, skipped_bytes, prefix_bytes) in zip(ends, begins, strict=True):
            prefix_at = codes_at + skipped_bytes
            joined += scan[at:stop], codes[suffix_at : suffix_at + suffix_bytes], codes[prefix_at : prefix_at + prefix_bytes]
            at = begin
        if flat_right:
            stop, _, suffix_at, suffix_bytes, _ = self._points[last].item()
            return [*joined, scan[at:stop], codes[suffix_at : suffix_at + suffix_bytes], self._flat]
        # the last MCU's last byte holds the next one's first bits too
        stop = self._points[last].item()[1] if last < len(self._points) else len(scan) - len(_END)
        return [*joined, scan[at:stop]]

    def _head(self, width: int, height: int) -> tuple[bytearray, int]:
        """What comes before the scan, of a file of this size and without the map; and where its frame header is."""
        skipped = _NAME_AT + int.from_bytes(self._data[_NAME_AT - 2 : _NAME_AT], "big") - 4
        head, frame = bytearray(self._data[skipped : self._scan]), self._header.at - skipped
        head[:2] = _SEGMENT[:2]
        struct.pack_into(">HH", head, frame + _SIZE_IN_FRAME, height, width)
        return head, frame


def fits(header: JpegHeader, mcu_height: int) -> bool:
    """Whether every cut of a file has a size that libjpeg decodes."""
    return max(header.width + _FLAT_COLUMNS * header.mcu_width, header.height + mcu_height) <= _LONGEST_SIDE


def open_tiles(data: bytes | memoryview, header: JpegHeader | None) -> Tiles | None:
    """The map of a file; None where it is not tiled. Raises ValueError where it is damaged, or has no `header` of a JPEG file."""
    if data[: len(_SEGMENT)] != _SEGMENT or data[_NAME_AT:_CRC_AT] != _NAME:
        return None
    if header is None:
        raise ValueError("no header")
    return Tiles(data, header)


def add_map(
    data: bytes, scan: int, *, interval: int, mcu_height: int, flat: bytes, points: NDArray[np.void], codes: bytes
) -> bytes | None:
    """The JPEG file `data`, whose scan begins at `scan`, with a map; None where the map is too long for a segment."""
    body = flat + points.tobytes() + codes
    size = _FLAT_AT - _NAME_AT + 2 + len(body)
    if size > _LONGEST_SEGMENT:
        return None
    before_scan = data[2:scan]
    new_scan = _NAME_AT - 2 + size + len(before_scan)
    fields = _FIELDS.pack(new_scan + len(data) - scan, new_scan, interval, mcu_height, len(flat))
    crc = _CRC.pack(zlib.crc32(fields + body + before_scan))
    return b"".join((_SEGMENT, size.to_bytes(2, "big"), _NAME, crc, fields, body, before_scan, data[scan:]))
