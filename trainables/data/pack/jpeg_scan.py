"""A JPEG file's scan as bits: its Huffman tables, how many bits each MCU's codes take, and which bytes they lie in.

How many bits follows from the coefficients, without reading a code (ITU-T T.81, annexes C and F). Files are those that
libjpeg-turbo writes: sequential, of one scan, without restarts.

Shapes: N MCUs in the scan's order, B blocks of an MCU, 64 coefficients of a block in zigzag order, C components.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainables.data.decoders.interface import JpegHeader
from trainables.data.pack.transcode import Plane

_ZIGZAG = np.array(sorted(range(64), key=lambda at: (at // 8 + at % 8, at // 8 if (at // 8 + at % 8) % 2 else at % 8)))
_NUM_BITS = np.array([value.bit_length() for value in range(2**15 + 1)])
_DHT, _SOS = 0xC4, 0xDA
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


def sampling(data: bytes, header: JpegHeader) -> list[tuple[int, int]]:
    """Of each component, how many blocks stand in an MCU across and down."""
    if header.channels == 1:
        return [(1, 1)]
    factors = data[header.at + 7 : header.at + 7 + 3 * header.channels : 3]
    return [(factor >> 4, factor & 15) for factor in factors]


def read_scan(data: bytes, header: JpegHeader) -> tuple[int, list[Component]]:
    """Where the scan's codes begin, and its components."""
    at, tables, marker = 2, dict[int, Huffman](), 0
    while marker != _SOS:
        marker, segment = data[at + 1], data[at + 4 : at + 2 + int.from_bytes(data[at + 2 : at + 4], "big")]
        if marker == _DHT:
            tables |= _huffman_tables(segment)
        at += 4 + len(segment)
    choices = segment[2 : 2 + 2 * header.channels : 2]
    factors = zip(sampling(data, header), choices, strict=True)
    return at, [Component(*factor, tables[choice >> 4], tables[0x10 | choice & 15]) for factor, choice in factors]


def _huffman_tables(segment: bytes) -> dict[int, Huffman]:
    """By class and number, as a segment has them."""
    tables, at = {}, 0
    while at < len(segment):
        counts, first = segment[at + 1 : at + 17], at + 17
        codes, lengths, code = [0] * 256, [0] * 256, 0
        for length, count in enumerate(counts, start=1):
            for symbol in segment[first : first + count]:
                codes[symbol], lengths[symbol] = code, length
                code += 1
            code, first = code << 1, first + count
        tables[segment[at]], at = Huffman(codes, lengths), first
    return tables


def in_scan_order(planes: list[Plane], factors: list[tuple[int, int]], num_rows: int) -> NDArray[np.int16]:
    """(N, B, 64), zigzag. Blocks without picture are as libjpeg writes them, flat and like the block before."""
    parts = []
    for (blocks_VH64, height, width), (across, down) in zip(planes, factors, strict=True):
        per_row = blocks_VH64.shape[1] // across
        real_VH = np.zeros(blocks_VH64.shape[:2], dtype=bool)
        real_VH[:height, :width] = True
        ordered, real = (
            array[: num_rows * down].reshape(num_rows, down, per_row, across, -1).swapaxes(1, 2).reshape(-1, down * across, size)
            for array, size in ((blocks_VH64[..., _ZIGZAG], 64), (real_VH, 1))
        )
        ordered[..., 1:] *= real
        for block in range(1, down * across):
            ordered[:, block, 0] = np.where(real[:, block, 0], ordered[:, block, 0], ordered[:, block - 1, 0])
        parts.append(ordered)
    return np.concatenate(parts, axis=1)


def bits_of_mcus(coefficients_NB64: NDArray[np.int16], components: list[Component]) -> NDArray[np.int64]:
    """(N,): how many bits the codes of each MCU take."""
    bits_N, first = np.zeros(len(coefficients_NB64), dtype=np.int64), 0
    for across, down, dc, ac in components:
        blocks_X64 = np.ascontiguousarray(coefficients_NB64[:, first : first + across * down]).reshape(-1, 64)
        first += across * down
        sizes = _NUM_BITS[np.abs(np.diff(blocks_X64[:, 0].astype(np.int64), prepend=0))]
        bits_X = np.array(dc.lengths)[sizes] + sizes
        bits_X += (blocks_X64[:, 63] == 0) * ac.lengths[END_OF_BLOCK]
        at = np.flatnonzero(blocks_X64)
        at = at[at % 64 > 0]
        block, position = at // 64, at % 64
        before = np.where(np.diff(block, prepend=-1) > 0, 0, np.roll(position, 1))
        run, sizes = position - before - 1, _NUM_BITS[np.abs(blocks_X64.ravel()[at].astype(np.int64))]
        bits = np.array(ac.lengths)[(run % 16) << 4 | sizes] + sizes + run // 16 * ac.lengths[SIXTEEN_ZEROS]
        bits_X += np.bincount(block, weights=bits, minlength=len(bits_X)).astype(np.int64)
        bits_N += bits_X.reshape(len(bits_N), -1).sum(axis=1)
    return bits_N


def unstuffed(codes: bytes, num_bits: int) -> tuple[NDArray[np.uint8], NDArray[np.int64]] | None:
    """The scan's bytes without the zeros after each FF, and where these FFs are among them.

    None where it is not just `num_bits` long: then it is not written as `bits_of_mcus` says.
    """
    stored = np.frombuffer(codes, dtype=np.uint8)
    ff = np.flatnonzero(stored == 0xFF)
    plain = np.delete(stored, ff + 1)
    return (plain, ff - np.arange(len(ff))) if len(plain) == -(-num_bits // 8) else None
