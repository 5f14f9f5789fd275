"""Makes tiled JPEG files, see `trainables.data.tiles`: finds the places, and the codes that lead to them and away.

Shapes: P places, S in each row of MCUs; C components.
"""

import itertools
from itertools import pairwise

import numpy as np

from trainables.data.decode import StoredImage, decode_image
from trainables.data.decoders import Pil
from trainables.data.decoders.interface import JpegHeader, read_header
from trainables.data.pack.jpeg_scan import (
    END_OF_BLOCK,
    Component,
    Scan,
    bits_of_mcus,
    blocks_of,
    in_scan_order,
    read_scan,
    sampling,
    unstuffed,
)
from trainables.data.pack.transcode import Plane, transcode
from trainables.data.tiles import PLACE, add_map

_TILE_BYTES = 500
"""Of the scan, in the mean: with fewer, less is decoded beside the crop, and the file grows by more (a place takes some 25)."""
_MOST_PLACES = 2400  # what a segment of 64 KiB surely holds

_Code = tuple[int, int]
"""A code, and its length in bits."""


class _NoCodeError(Exception):
    """A file's own Huffman tables lack a symbol."""


def tiled(data: bytes) -> bytes | None:
    """The JPEG file as a tiled one, of the same pixels; None where it is too small for that, unusual or damaged.

    Its codes are left as they are where its own Huffman tables will do; else it is written anew, without loss. Metadata is left
    out. Raises DataError where libjpeg-turbo is not installed.
    """
    header = read_header(data)
    factors = sampling(data, header) if header else []
    if header is None or not all(across and down for across, down in factors):
        return None
    found = transcode(data, [across for across, _ in factors])
    if found is None:
        return None
    anew, planes = found
    as_it_is = _with_map(data, header, planes, anew=False)
    new_header = read_header(anew)
    return as_it_is or (_with_map(anew, new_header, planes, anew=True) if new_header else None)


def has_pixels_of(content: bytes, original: bytes | memoryview) -> bool:
    """Whether a tiled file shows what the original shows: the whole of it, and parts that are cut out of it."""
    expected_HWC = np.asarray(decode_image(original))
    stored = StoredImage(content, Pil())
    height, width = expected_HWC.shape[:2]
    xs, ys = ((0, side // 3, side - side // 3, side) for side in (width, height))
    boxes = [(left, top, right, bottom) for left, right in pairwise(xs) for top, bottom in pairwise(ys)]
    same = (np.array_equal(stored.part(box), expected_HWC[box[1] : box[3], box[0] : box[2]]) for box in boxes)
    return np.array_equal(np.asarray(decode_image(content)), expected_HWC) and all(same)


def _with_map(data: bytes, header: JpegHeader, planes: list[Plane], *, anew: bool) -> bytes | None:
    scan = read_scan(data, header)
    if scan is None:
        return None
    factors = [(component.across, component.down) for component in scan.components]
    mcu_height = 8 * max(down for _, down in factors)
    num_rows, per_row = -(-header.height // mcu_height), -(-header.width // header.mcu_width)
    num_tiles = min(round((len(scan.data) - scan.begin) / (num_rows * _TILE_BYTES)), _MOST_PLACES // num_rows, per_row)
    if num_tiles < 1:
        return None
    coefficients_NB64 = in_scan_order(planes, factors, num_rows, anew=anew)
    bit_ends_N = np.cumsum(bits_of_mcus(coefficients_NB64, scan.components))
    if (bytes_of_scan := unstuffed(scan, int(bit_ends_N[-1]))) is None:
        return None
    plain, ff = bytes_of_scan
    interval = -(-per_row // num_tiles)
    before_P = np.add.outer(np.arange(num_rows) * per_row, np.arange(0, per_row, interval)).ravel() - 1
    last_blocks = [blocks.stop - 1 for blocks in blocks_of(scan.components)]
    bits_P = np.where(before_P < 0, 0, bit_ends_N[before_P])
    dc_PC = np.where(before_P[:, None] < 0, 0, coefficients_NB64[before_P][:, last_blocks, 0])
    try:
        flat, joints = _joints(scan, plain[bits_P // 8].tolist(), (bits_P % 8).tolist(), dc_PC.tolist())
    except _NoCodeError:
        return None
    places = np.zeros(len(bits_P), dtype=PLACE)
    for name, byte_P in (("end", bits_P // 8), ("begin", -(-bits_P // 8))):
        places[name] = byte_P + np.searchsorted(ff, byte_P)
    places["leave"], places["enter"] = (list(map(len, side)) for side in zip(*joints, strict=True))
    sizes = [len(leave) + len(enter) for leave, enter in joints]
    places["joints"] = [0, *itertools.accumulate(sizes[:-1])]
    codes = b"".join(itertools.chain.from_iterable(joints))
    return add_map(
        scan.data, scan.begin, interval=interval, mcu_height=mcu_height, flat=flat, places=places, joints=codes
    )


def _joints(
    scan: Scan, byte_P: list[int], bit_P: list[int], dc_PC: list[list[int]]
) -> tuple[bytes, list[tuple[bytes, bytes]]]:
    """A flat MCU; and of each place, which is at this bit of its byte, the bytes that leave it and those that enter it.

    The first hold what the byte has before the place and an MCU that brings the DC prediction to 0, the second an MCU that brings it
    there and what the byte has after the place. Raises _NoCodeError.
    """
    writer = _FlatMcus(scan.components)
    zero = [0] * len(scan.components)
    joints = []
    for byte, bit, dc_C in zip(byte_P, bit_P, dc_PC, strict=True):
        leave = writer.mcu([-dc for dc in dc_C], (byte >> (8 - bit), bit), 0)
        enter, num_bits = writer.mcu(dc_C, (0, 0), bit)
        if bit:
            enter, num_bits = enter << (8 - bit) | byte & (0xFF >> bit), num_bits + 8 - bit
        joints.append((_stuffed(leave), _stuffed((enter, num_bits))))
    return _stuffed(writer.mcu(zero, (0, 0), 0)), joints


class _FlatMcus:
    """Codes of MCUs whose blocks are nearly flat. Raises _NoCodeError where a component's tables lack what all of them need."""

    def __init__(self, components: list[Component]) -> None:
        self._components = components
        self._ends = [_code(component.ac.codes, component.ac.lengths, END_OF_BLOCK) for component in components]
        ac = components[0].ac
        # coefficients without a zero before them: of each size, the smallest
        sizes = [size for size in range(1, 11) if ac.lengths[size]]
        self._fillers = _fillers([(ac.codes[size] << size | 1 << (size - 1), ac.lengths[size] + size) for size in sizes])

    def mcu(self, diffs_C: list[int], before: _Code, end: int) -> _Code:
        """`before` and the codes of an MCU of these DC differences, after which a byte has `end` bits, or is full at 0."""
        codes: list[_Code] = []
        for diff, end_of_block, (across, down, dc, _) in zip(diffs_C, self._ends, self._components, strict=True):
            size = abs(diff).bit_length()
            codes += (_code(dc.codes, dc.lengths, size), (diff if diff > 0 else diff + (1 << size) - 1, size), end_of_block)
            if across * down > 1:
                codes += (_code(dc.codes, dc.lengths, 0), end_of_block) * (across * down - 1)
        num_bits = before[1] + sum(length for _, length in codes)
        codes[2:2] = self._fillers[(end - num_bits) % 8]
        bits = before
        for code, length in codes:
            bits = bits[0] << length | code, bits[1] + length
        return bits


def _code(codes: list[int], lengths: list[int], symbol: int) -> _Code:
    if not lengths[symbol]:
        raise _NoCodeError
    return codes[symbol], lengths[symbol]


def _fillers(codes: list[_Code]) -> list[list[_Code]]:
    """For each number of bits modulo 8 the fewest codes that have as many. Raises _NoCodeError."""
    found: dict[int, list[_Code]] = {0: []}
    for _ in range(8):
        for bits, chosen in list(found.items()):
            for code in codes:
                found.setdefault((bits + code[1]) % 8, [*chosen, code])
    if len(found) < 8:
        raise _NoCodeError
    return [found[bits] for bits in range(8)]


def _stuffed(bits: _Code) -> bytes:
    """Whole bytes as a scan has them."""
    return bits[0].to_bytes(bits[1] // 8, "big").replace(b"\xff", b"\xff\x00")
