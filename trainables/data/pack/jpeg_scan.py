"""A JPEG file's scan as bits: its Huffman tables, how many bits each MCU's codes take, and which bytes they lie in.

How many bits follows from the coefficients, without reading a code (ITU-T T.81, annexes C and F).

Shapes: N MCUs in the scan's order, B blocks of an MCU, 64 coefficients of a block in zigzag order, C components.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainables.data.decoders.interface import JpegHeader
from trainables.data.pack.transcode import Plane

_ZIGZAG = np.array(sorted(range(64), key=lambda at: (at // 8 + at % 8, at // 8 if (at // 8 + at % 8) % 2 else at % 8)))
_NUM_BITS = np.array([value.bit_length() for value in range(2**15 + 1)])
_DHT, _SOS, _DRI = 0xC4, 0xDA, 0xDD
_METADATA = frozenset((*range(0xE1, 0xEE), 0xEF, 0xFE))  # APPn, COM; but JFIF's and Adobe's, by which colours are decoded
END_OF_BLOCK, SIXTEEN_ZEROS = 0x00, 0xF0


class Huffman(NamedTuple):
    """A table of Huffman codes, by symbol; one of length 0 is not there."""

    codes: list[int]
    lengths: list[int]


class Component(NamedTuple):
    """How a component's blocks stand in an MCU, and their tables of codes."""

    across: int
    down: int
    dc: Huffman
    ac: Huffman


class Scan(NamedTuple):
    """A JPEG file without metadata, of a single scan whose codes begin at `begin`."""

    data: bytes
    begin: int
    components: list[Component]


def sampling(data: bytes, header: JpegHeader) -> list[tuple[int, int]]:
    """Of each component, how many blocks stand in an MCU across and down."""
    if header.channels == 1:
        return [(1, 1)]
    factors = data[header.at + 7 : header.at + 7 + 3 * header.channels : 3]
    return [(factor >> 4, factor & 15) for factor in factors]


def read_scan(data: bytes, header: JpegHeader) -> Scan | None:
    """The scan of a file that is sequential, without restarts, and has all components in its first scan; None of another."""
    if header.progressive:
        return None
    at, segments, tables = 2, [data[:2]], dict[int, Huffman]()
    while at + 4 <= len(data):
        marker, end = data[at + 1], at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")
        if data[at] != 0xFF or marker == 0xFF or marker == _DRI or end > len(data):
            return None
        if marker not in _METADATA:
            segments.append(data[at:end])
        if marker == _DHT:
            tables |= _huffman_tables(data[at + 4 : end])
        if marker == _SOS:
            break
        at = end
    else:
        return None
    names = data[header.at + 6 : header.at + 6 + 3 * header.channels : 3]
    if data[at + 4] != header.channels or data[at + 5 : at + 5 + 2 * header.channels : 2] != names:
        return None
    choices = data[at + 6 : at + 6 + 2 * header.channels : 2]
    if not {key for choice in choices for key in (choice >> 4, 0x10 | choice & 15)} <= set(tables):
        return None
    components = [
        Component(*factors, tables[choice >> 4], tables[0x10 | choice & 15])
        for factors, choice in zip(sampling(data, header), choices, strict=True)
    ]
    before = b"".join(segments)
    return Scan(before + data[end:], len(before), components)


def _huffman_tables(segment: bytes) -> dict[int, Huffman]:
    """By class and number, as a segment has them."""
    tables, at = {}, 0
    while at + 17 <= len(segment):
        counts = segment[at + 1 : at + 17]
        symbols = iter(segment[at + 17 : at + 17 + sum(counts)])
        codes, lengths, code = [0] * 256, [0] * 256, 0
        for length, count in enumerate(counts, start=1):
            for symbol in (next(symbols, 0) for _ in range(count)):
                codes[symbol], lengths[symbol] = code, length
                code += 1
            code <<= 1
        tables[segment[at]] = Huffman(codes, lengths)
        at += 17 + sum(counts)
    return tables


def in_scan_order(planes: list[Plane], factors: list[tuple[int, int]], num_rows: int, *, anew: bool) -> NDArray[np.int16]:
    """(N, B, 64), zigzag. `anew`: blocks without picture are as libjpeg writes them, flat and like the block before."""
    parts = []
    for (blocks_VH64, height, width), (across, down) in zip(planes, factors, strict=True):
        per_row = blocks_VH64.shape[1] // across
        real_VH = np.zeros(blocks_VH64.shape[:2], dtype=bool)
        real_VH[:height, :width] = True
        ordered, real = (
            array[: num_rows * down].reshape(num_rows, down, per_row, across, -1).swapaxes(1, 2).reshape(-1, down * across, size)
            for array, size in ((blocks_VH64[..., _ZIGZAG], 64), (real_VH, 1))
        )
        if anew:
            ordered[..., 1:] *= real
            for block in range(1, down * across):
                ordered[:, block, 0] = np.where(real[:, block, 0], ordered[:, block, 0], ordered[:, block - 1, 0])
        parts.append(ordered)
    return np.concatenate(parts, axis=1)


def blocks_of(components: list[Component]) -> list[slice]:
    """Which blocks of an MCU are each component's."""
    ends = np.cumsum([component.across * component.down for component in components]).tolist()
    return [slice(begin, end) for begin, end in zip([0, *ends[:-1]], ends, strict=True)]


def bits_of_mcus(coefficients_NB64: NDArray[np.int16], components: list[Component]) -> NDArray[np.int64]:
    """(N,): how many bits the codes of each MCU take, as long as they are written in the one usual way."""
    bits_N = np.zeros(len(coefficients_NB64), dtype=np.int64)
    for component, blocks in zip(components, blocks_of(components), strict=True):
        blocks_X64 = np.ascontiguousarray(coefficients_NB64[:, blocks]).reshape(-1, 64)
        dc_lengths, ac_lengths = np.array(component.dc.lengths), np.array(component.ac.lengths)
        sizes = _NUM_BITS[np.abs(np.diff(blocks_X64[:, 0].astype(np.int64), prepend=0))]
        bits_X = dc_lengths[sizes] + sizes
        bits_X += (blocks_X64[:, 63] == 0) * component.ac.lengths[END_OF_BLOCK]
        at = np.flatnonzero(blocks_X64)
        at = at[at % 64 > 0]
        block, position = at // 64, at % 64
        before = np.where(np.diff(block, prepend=-1) > 0, 0, np.roll(position, 1))
        run, sizes = position - before - 1, _NUM_BITS[np.abs(blocks_X64.ravel()[at].astype(np.int64))]
        bits = ac_lengths[(run % 16) << 4 | sizes] + sizes + run // 16 * component.ac.lengths[SIXTEEN_ZEROS]
        bits_X += np.bincount(block, weights=bits, minlength=len(bits_X)).astype(np.int64)
        bits_N += bits_X.reshape(len(bits_N), -1).sum(axis=1)
    return bits_N


def unstuffed(scan: Scan, num_bits: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]] | None:
    """The scan's bytes without the zeros after each FF, and where these FFs are among them.

    None where there are other markers, or where it is not just `num_bits` long: then it is not written as `bits_of_mcus` says.
    """
    stored = np.frombuffer(scan.data, dtype=np.uint8)[scan.begin : -2]
    ff = np.flatnonzero(stored == 0xFF)
    if not len(stored) or (len(ff) and (ff[-1] + 1 == len(stored) or (stored[ff + 1] != 0).any())):
        return None
    plain = np.delete(stored, ff + 1)
    fill = 2 ** (-num_bits % 8) - 1
    if len(plain) != -(-num_bits // 8) or int(plain[-1]) & fill != fill:
        return None
    return plain, ff - np.arange(len(ff))
