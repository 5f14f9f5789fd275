"""Tiled JPEG files: a crop is decoded from the codes that it needs, not from all that lie above and beside it too.

A tiled file is an ordinary JPEG file, which any decoder opens. A segment of its own (APP11) maps places in its scan, a tile's
width apart in each row of MCUs. To each place lead the codes of an MCU of flat colour, from a byte's beginning and a DC prediction
of 0; and back to these lead those of another. With them, parts of rows are joined to a smaller file, whose pixels are those of
the whole but for two columns of such MCUs at its left or its right, or one row at its top. Restart markers would do the
same; but libjpeg-turbo decodes files that have them 30% slower, more than a crop saves.

Shapes: R rows of MCUs, S places in each.
"""

import struct
import zlib
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainables.data.decoders.interface import Box, Decoded, JpegHeader

PLACE = np.dtype([("end", ">u4"), ("begin", ">u4"), ("joints", ">u2"), ("leave", "u1"), ("enter", "u1")])
"""A place in the scan: where the whole bytes before it end and those after it begin, counted from the scan's first; where its
joints begin, counted from the first place's, and the bytes of the two: the one that leaves it, then the one that enters."""

_SEGMENT, _NAME = b"\xff\xd8\xff\xeb", b"rdtiles1"
_CRC = struct.Struct(">I")  # of all that follows it and lies before the scan
_FIELDS = struct.Struct(">IIHBB")  # bytes of the file; the scan's offset; MCUs of a tile; pixels of an MCU's height; bytes of `flat`
_NAME_AT = len(_SEGMENT) + 2
_CRC_AT = _NAME_AT + len(_NAME)
_FIELDS_AT = _CRC_AT + _CRC.size
_FLAT_AT = _FIELDS_AT + _FIELDS.size
_LONGEST_SEGMENT = 2**16 - 1
_SIZE_IN_FRAME = 1  # where a frame header has height and width
_END = b"\xff\xd9"
_SLACK = bytes(4096)
"""After a cut: libjpeg-turbo decodes the last codes of a file more slowly, when fewer than 512 bytes a block follow."""
_MARGIN = 4
"""Pixels: decoders take 2 more than the box, and for these upsampling of chroma looks at another 2."""
_FLAT_COLUMNS = 2

_Place = tuple[int, int, int, int, int]


class Cut(NamedTuple):
    """A part of a tiled file, as a file; its first pixel is at (left, top) of the whole, which may be outside."""

    data: bytes
    header: JpegHeader
    left: int
    top: int
    real: Box
    """Which of its pixels are the whole's."""

    def box(self, box: Box) -> Box:
        """A box of the whole, in this file."""
        return box[0] - self.left, box[1] - self.top, box[2] - self.left, box[3] - self.top

    def decoded(self, part: Decoded) -> Decoded:
        """What was decoded of this file, as a part of the whole."""
        rgb_HWC, left, top, shrink = part
        first_x, first_y = max(self.real[0] // shrink, left), max(self.real[1] // shrink, top)
        last_x = -(-self.real[2] // shrink)
        real_HWC = rgb_HWC[first_y - top :, first_x - left : last_x - left]
        return Decoded(real_HWC, first_x + self.left // shrink, first_y + self.top // shrink, shrink)


class Tiles:
    """The map of a tiled file."""

    def __init__(self, data: bytes | memoryview, header: JpegHeader) -> None:
        """Raises ValueError where the map, or another part of the file's header, is damaged."""
        self._data, self._header = data, header
        try:
            (crc,) = _CRC.unpack_from(data, _CRC_AT)
            num_bytes, self._scan, self._interval, self._mcu_height, flat = _FIELDS.unpack_from(data, _FIELDS_AT)
        except struct.error:
            raise ValueError("cut off") from None
        if num_bytes != len(data) or zlib.crc32(data[_FIELDS_AT : self._scan]) != crc:
            raise ValueError("another checksum")
        self._columns = -(-header.width // header.mcu_width)
        shape = -(-header.height // self._mcu_height), -(-self._columns // self._interval)
        places_at = _FLAT_AT + flat
        self._flat = bytes(data[_FLAT_AT:places_at])
        self._places_RS: NDArray[np.void] = np.ndarray(shape, PLACE, data, places_at)
        self._joints = places_at + self._places_RS.nbytes

    def cut(self, box: Box, shrink: int) -> Cut:
        """The part that decoders need for the pixels in `box`, of the image shrunk by 1, 2, 4 or 8."""
        header, margin, (num_rows, num_tiles) = self._header, _MARGIN * shrink, self._places_RS.shape
        tile_width, mcu_width, mcu_height = self._interval * header.mcu_width, header.mcu_width, self._mcu_height
        left, right = max(0, box[0] - margin) // tile_width, min(num_tiles, -(-(box[2] + margin) // tile_width))
        top, bottom = max(0, box[1] - margin) // mcu_height, min(num_rows, -(-(box[3] + margin) // mcu_height))
        # Flat MCUs are at the left where that is not the picture's edge, whose pixels they would change, and else at the right
        flat_left = _FLAT_COLUMNS if left else 0
        flat_right = _FLAT_COLUMNS if right < num_tiles and not left else 0
        flat_top = 1 if top and not left else 0
        begins: list[_Place] = self._places_RS[top:bottom, left].tolist()
        columns = min(self._columns, right * self._interval) - left * self._interval + flat_left + flat_right
        first_enter = self._enter(begins[0])
        if flat_left:
            before = self._flat + first_enter
        else:
            before = self._flat * (columns - 1) + first_enter if flat_top else b""
        scan = self._scan_of(begins, self._ends(top, bottom, right), bool(flat_left), bool(flat_right))
        x, y = left * tile_width, top * mcu_height
        real_width = min(header.width, right * tile_width) - x
        real_height = min(header.height, bottom * mcu_height) - y
        real_x, real_y = flat_left * mcu_width, flat_top * mcu_height
        height, width = real_y + real_height, real_x + real_width + flat_right * mcu_width
        map_end = _NAME_AT - 2 + int.from_bytes(self._data[_NAME_AT - 2 : _NAME_AT], "big")
        head = bytearray(self._data[map_end - 2 : self._scan])
        head[:2] = _SEGMENT[:2]
        frame = header.at - map_end + 2
        struct.pack_into(">HH", head, frame + _SIZE_IN_FRAME, height, width)
        return Cut(
            b"".join((head, before, *scan, _END, _SLACK)),
            header._replace(width=width, height=height, at=frame),
            x - real_x,
            y - real_y,
            (real_x, real_y, real_x + real_width, height),
        )

    def _ends(self, top: int, bottom: int, right: int) -> list[_Place]:
        """Where these rows of MCUs end; at the picture's edge, that is where the next begins."""
        num_rows, num_tiles = self._places_RS.shape
        ends: list[_Place] = (
            self._places_RS[top:bottom, right] if right < num_tiles else self._places_RS[top + 1 : bottom + 1, 0]
        ).tolist()
        if bottom == num_rows and right == num_tiles:
            end = len(self._data) - len(_END) - self._scan
            ends.append((end, end, 0, 0, 0))
        return ends

    def _scan_of(
        self, begins: list[_Place], ends: list[_Place], flat_left: bool, flat_right: bool
    ) -> list[bytes | memoryview]:
        """The codes of these parts of rows, and of the MCUs between one and the next."""
        data, scan = self._data, self._scan
        if not flat_left and not flat_right:
            return [data[scan + begins[0][1] : scan + ends[-1][1]]]
        parts = [data[scan + begins[0][1] : scan + ends[0][0]]]
        for left, begin, end in zip(ends, begins[1:], ends[1:], strict=False):
            parts += self._leave(left), self._enter(begin), data[scan + begin[1] : scan + end[0]]
        if flat_right:
            return [*parts, self._leave(ends[-1]), self._flat]
        return [*parts, data[scan + ends[-1][0] : scan + ends[-1][1]]]  # the byte that the last MCU shares with the next one

    def _leave(self, place: _Place) -> bytes | memoryview:
        at = self._joints + place[2]
        return self._data[at : at + place[3]]

    def _enter(self, place: _Place) -> bytes | memoryview:
        at = self._joints + place[2] + place[3]
        return self._data[at : at + place[4]]


def open_tiles(data: bytes | memoryview, header: JpegHeader) -> Tiles | None:
    """The map of a JPEG file; None where it is not tiled. Raises ValueError where it is damaged."""
    if data[:4] != _SEGMENT or data[_NAME_AT:_CRC_AT] != _NAME:
        return None
    return Tiles(data, header)


def add_map(
    data: bytes, scan: int, *, interval: int, mcu_height: int, flat: bytes, places: NDArray[np.void], joints: bytes
) -> bytes | None:
    """The JPEG file `data`, whose scan's codes begin at `scan`, with a map; None where the map is too long for a segment."""
    body = flat + places.tobytes() + joints
    size = _FLAT_AT - _NAME_AT + 2 + len(body)
    if size > _LONGEST_SEGMENT:
        return None
    before_scan = data[2:scan]
    new_scan = _NAME_AT - 2 + size + len(before_scan)
    fields = _FIELDS.pack(new_scan + len(data) - scan, new_scan, interval, mcu_height, len(flat))
    crc = _CRC.pack(zlib.crc32(fields + body + before_scan))
    return b"".join((_SEGMENT, size.to_bytes(2, "big"), _NAME, crc, fields, body, before_scan, data[scan:]))
