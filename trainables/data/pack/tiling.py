"""Makes tiled JPEG files, see `trainables.data.tiles`.

Shapes: N MCUs in the scan's order, B blocks of an MCU, P entry points, C components.
"""

from itertools import accumulate, pairwise

import numpy as np

from trainables.data.decode import StoredImage, decode_image
from trainables.data.decoders import Pil
from trainables.data.decoders.interface import JpegHeader, read_header
from trainables.data.pack.jpeg_scan import (
    END_OF_BLOCK,
    Component,
    Huffman,
    bits_of_mcus,
    in_scan_order,
    read_scan,
    sampling,
    unstuffed,
)
from trainables.data.pack.transcode import Plane, transcode
from trainables.data.tiles import ENTRY_POINT, add_map, fits

_TILE_BYTES = 350
"""Of the scan, in the mean: with fewer, less is decoded around the crop, and the file grows by more.

With 350, 500 and 700 files of ImageNet grow by 7, 5 and 3%, and a crop of one takes 1.25, 1.21 and 1.16 times less.
"""
_MIN_BYTES = 12_000  # of the scan: of less, decoding it all takes no longer than cutting
_MAX_GROWTH = 1.3  # where a progressive file, or one of a flat color, grows by more, it is not worth it
_MAX_PIXELS = 2**24  # whose coefficients take half a gigabyte here
_MAX_POINTS = 1900  # which take up to 34 bytes each in a segment of 64 KiB: more than most files need
_Code = tuple[int, int]
"""Bits as a number, and how many they are."""


def tiled(data: bytes) -> bytes | None:
    """The JPEG file as a tiled one, of the same pixels; None where it is too small for that, unusual or damaged.

    Its coefficients are re-encoded with the standard Huffman tables, and metadata is left out. Raises DataError where
    libjpeg-turbo is not installed.
    """
    header = read_header(data)
    if header is None or header.width * header.height > _MAX_PIXELS:
        return None
    factors = sampling(data, header)
    if not all(across and down for across, down in factors):
        return None
    if (found := transcode(data, [across for across, _ in factors])) is None:
        return None
    transcoded, planes = found
    new_header = read_header(transcoded)
    content = _with_map(transcoded, new_header, planes, _MAX_POINTS) if new_header else None
    return content if content and len(content) < _MAX_GROWTH * len(data) else None


def has_pixels_of(content: bytes, original: bytes | memoryview) -> bool:
    """Whether a tiled file shows what the original shows: the whole of it, and parts that are cut out of it."""
    expected_HWC = np.asarray(decode_image(original))
    stored = StoredImage(content, Pil())
    height, width = expected_HWC.shape[:2]
    xs, ys = ((0, side // 3, side - side // 3, side) for side in (width, height))
    boxes = [(left, top, right, bottom) for left, right in pairwise(xs) for top, bottom in pairwise(ys)]
    same = (np.array_equal(stored.part(box), expected_HWC[box[1] : box[3], box[0] : box[2]]) for box in boxes)
    return np.array_equal(np.asarray(decode_image(content)), expected_HWC) and all(same)


def _with_map(data: bytes, header: JpegHeader, planes: list[Plane], max_points: int) -> bytes | None:
    """The file with a map of at most so many entry points; where that is too long for its segment, of half as many."""
    begin, components = read_scan(data, header)
    factors = [(component.across, component.down) for component in components]
    mcu_height = 8 * max(down for _, down in factors)
    num_rows, per_row = -(-header.height // mcu_height), -(-header.width // header.mcu_width)
    num_bytes = len(data) - begin
    num_tiles = min(round(num_bytes / (num_rows * _TILE_BYTES)), max_points // num_rows, per_row)
    if num_tiles < 1 or num_bytes < _MIN_BYTES or not fits(header, mcu_height):
        return None
    coefficients_NB64 = in_scan_order(planes, factors, num_rows)
    bit_ends_N = np.cumsum(bits_of_mcus(coefficients_NB64, components))
    if (scan_bytes := unstuffed(data[begin:-2], int(bit_ends_N[-1]))) is None:
        return None
    plain, ff = scan_bytes
    interval = -(-per_row // num_tiles)
    before_P = np.add.outer(np.arange(num_rows) * per_row, np.arange(0, per_row, interval)).ravel() - 1
    last_blocks = [end - 1 for end in accumulate(across * down for across, down in factors)]
    bits_P = np.where(before_P < 0, 0, bit_ends_N[before_P])
    dc_PC = np.where(before_P[:, None] < 0, 0, coefficients_NB64[before_P][:, last_blocks, 0])
    mcus = _FlatMcus(components)
    bytes_P = plain[bits_P // 8].tolist()
    affixes = [mcus.affixes(*point) for point in zip(bytes_P, (bits_P % 8).tolist(), dc_PC.tolist(), strict=True)]
    points = np.zeros(len(bits_P), dtype=ENTRY_POINT)
    for name, byte_P in (("end", bits_P // 8), ("begin", -(-bits_P // 8))):
        points[name] = byte_P + np.searchsorted(ff, byte_P)
    points["suffix"], points["prefix"] = ([len(affix[at]) for affix in affixes] for at in (0, 1))
    codes = [suffix + prefix for suffix, prefix in affixes]
    points["codes"] = np.cumsum([0, *map(len, codes[:-1])])  # which overflow only in a map that is too long
    layout = {"interval": interval, "mcu_height": mcu_height}
    content = add_map(data, begin, **layout, flat=mcus.flat, points=points, codes=b"".join(codes))
    return content or _with_map(data, header, planes, max_points // 2)


class _FlatMcus:
    """Huffman codes of flat MCUs: from a whole byte and a DC prediction of 0 to any bit and any prediction, and back."""

    def __init__(self, components: list[Component]) -> None:
        self._components = components
        ac = components[0].ac
        # coefficients without a zero before them: of each size, the smallest
        sizes = [size for size in range(1, 11) if ac.lengths[size]]
        codes = [(ac.codes[size] << size | 1 << (size - 1), ac.lengths[size] + size) for size in sizes]
        self._padding: dict[int, list[_Code]] = {0: []}
        """For each number of bits modulo 8 the fewest codes that have as many."""
        for _ in range(8):
            for num_bits, chosen in list(self._padding.items()):
                for code in codes:
                    self._padding.setdefault((num_bits + code[1]) % 8, [*chosen, code])
        self.flat = _stuffed(self._mcu([0] * len(components), (0, 0), 0))
        """An MCU that changes no prediction, in whole bytes."""

    def affixes(self, byte: int, bit: int, dc_C: list[int]) -> tuple[bytes, bytes]:
        """Suffix and prefix of an entry point that lies at a bit of a byte and has a DC prediction.

        A suffix begins with the bits that its byte has before the point, a prefix ends with those that it has after.
        """
        suffix = self._mcu([-dc for dc in dc_C], (byte >> (8 - bit), bit), 0)
        bits, num_bits = self._mcu(dc_C, (0, 0), bit)
        if bit:
            bits, num_bits = bits << (8 - bit) | byte & (0xFF >> bit), num_bits + 8 - bit
        return _stuffed(suffix), _stuffed((bits, num_bits))

    def _mcu(self, diffs_C: list[int], before: _Code, end: int) -> _Code:
        """`before` and an MCU of these DC differences, padded with AC coefficients so that the last byte has `end` bits, or 8."""
        codes: list[_Code] = []
        for diff, (across, down, dc, ac) in zip(diffs_C, self._components, strict=True):
            size, end_of_block = abs(diff).bit_length(), _code(ac, END_OF_BLOCK)
            codes += _code(dc, size), (diff if diff > 0 else diff + (1 << size) - 1, size), end_of_block
            codes += (_code(dc, 0), end_of_block) * (across * down - 1)
        codes[2:2] = self._padding[(end - before[1] - sum(length for _, length in codes)) % 8]
        bits, num_bits = before
        for code, length in codes:
            bits, num_bits = bits << length | code, num_bits + length
        return bits, num_bits


def _code(table: Huffman, symbol: int) -> _Code:
    return table.codes[symbol], table.lengths[symbol]


def _stuffed(bits: _Code) -> bytes:
    """Whole bytes as a scan has them."""
    return bits[0].to_bytes(bits[1] // 8, "big").replace(b"\xff", b"\xff\x00")
