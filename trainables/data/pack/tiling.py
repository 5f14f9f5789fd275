"""Makes tiled JPEG files, see `trainables.data.tiles`.

Shapes: N MCUs in the scan's order, B blocks of an MCU, P entry points, C components.
"""

from itertools import pairwise

import numpy as np

from trainables.data.decode import StoredImage, decode_image
from trainables.data.decoders import Pil
from trainables.data.decoders.interface import JpegHeader, read_header
from trainables.data.pack.flat_mcus import FlatMcus, NoCodeError
from trainables.data.pack.jpeg_scan import (
    bits_of_mcus,
    blocks_of,
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
_LEAST_BYTES = 12_000  # of the scan: of less, decoding it all takes no longer than cutting
_MOST_GROWTH = 1.3  # where a progressive file, or one of a flat colour, grows by more, it is not worth it
_MOST_PIXELS = 2**24  # whose coefficients take half a gigabyte here
_MOST_POINTS = 1900  # which take up to 34 bytes each in a segment of 64 KiB: more than most files need


def tiled(data: bytes) -> bytes | None:
    """The JPEG file as a tiled one, of the same pixels; None where it is too small for that, unusual or damaged.

    Its codes are left as they are where its own Huffman tables will do; else it is written anew, without loss. Metadata is left
    out. Raises DataError where libjpeg-turbo is not installed.
    """
    header = read_header(data)
    if header is None or header.width * header.height > _MOST_PIXELS:
        return None
    factors = sampling(data, header)
    if not all(across and down for across, down in factors):
        return None
    found = transcode(data, [across for across, _ in factors])
    if found is None:
        return None
    anew, planes = found
    as_it_is = _with_map(data, header, planes, anew=False)
    new_header = read_header(anew)
    content = as_it_is or (_with_map(anew, new_header, planes, anew=True) if new_header else None)
    return content if content and len(content) < _MOST_GROWTH * len(data) else None


def has_pixels_of(content: bytes, original: bytes | memoryview) -> bool:
    """Whether a tiled file shows what the original shows: the whole of it, and parts that are cut out of it."""
    expected_HWC = np.asarray(decode_image(original))
    stored = StoredImage(content, Pil())
    height, width = expected_HWC.shape[:2]
    xs, ys = ((0, side // 3, side - side // 3, side) for side in (width, height))
    boxes = [(left, top, right, bottom) for left, right in pairwise(xs) for top, bottom in pairwise(ys)]
    same = (np.array_equal(stored.part(box), expected_HWC[box[1] : box[3], box[0] : box[2]]) for box in boxes)
    return np.array_equal(np.asarray(decode_image(content)), expected_HWC) and all(same)


def _with_map(
    data: bytes, header: JpegHeader, planes: list[Plane], *, anew: bool, most_points: int = _MOST_POINTS
) -> bytes | None:
    """`anew`: libjpeg-turbo has written the file. Where the map is too long, it is made of half as many points."""
    scan = read_scan(data, header)
    if scan is None:
        return None
    factors = [(component.across, component.down) for component in scan.components]
    mcu_height = 8 * max(down for _, down in factors)
    num_rows, per_row = -(-header.height // mcu_height), -(-header.width // header.mcu_width)
    num_bytes = len(scan.data) - scan.begin
    num_tiles = min(round(num_bytes / (num_rows * _TILE_BYTES)), most_points // num_rows, per_row)
    if num_tiles < 1 or num_bytes < _LEAST_BYTES or not fits(header, mcu_height):
        return None
    coefficients_NB64 = in_scan_order(planes, factors, num_rows, anew=anew)
    bit_ends_N = np.cumsum(bits_of_mcus(coefficients_NB64, scan.components))
    if (scan_bytes := unstuffed(scan, int(bit_ends_N[-1]))) is None:
        return None
    plain, ff = scan_bytes
    interval = -(-per_row // num_tiles)
    before_P = np.add.outer(np.arange(num_rows) * per_row, np.arange(0, per_row, interval)).ravel() - 1
    last_blocks = [blocks.stop - 1 for blocks in blocks_of(scan.components)]
    bits_P = np.where(before_P < 0, 0, bit_ends_N[before_P])
    dc_PC = np.where(before_P[:, None] < 0, 0, coefficients_NB64[before_P][:, last_blocks, 0])
    try:
        mcus = FlatMcus(scan.components)
        suffixes, prefixes = mcus.affixes(plain[bits_P // 8].tolist(), (bits_P % 8).tolist(), dc_PC.tolist())
    except NoCodeError:
        return None
    points = np.zeros(len(bits_P), dtype=ENTRY_POINT)
    for name, byte_P in (("end", bits_P // 8), ("begin", -(-bits_P // 8))):
        points[name] = byte_P + np.searchsorted(ff, byte_P)
    points["suffix"], points["prefix"] = list(map(len, suffixes)), list(map(len, prefixes))
    both = [suffix + prefix for suffix, prefix in zip(suffixes, prefixes, strict=True)]
    points["codes"] = np.cumsum([0, *map(len, both[:-1])])  # which overflow only in a map that is too long
    layout = {"interval": interval, "mcu_height": mcu_height}
    content = add_map(scan.data, scan.begin, **layout, flat=mcus.flat, points=points, codes=b"".join(both))
    return content or _with_map(data, header, planes, anew=anew, most_points=most_points // 2)
