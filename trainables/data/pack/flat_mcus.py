"""Huffman codes of flat MCUs, that lead from a whole byte and a DC prediction of 0 to any bit and any prediction, and back.

Shapes: P entry points, C components.
"""

from trainables.data.pack.jpeg_scan import END_OF_BLOCK, Component, Huffman

_Code = tuple[int, int]
"""Bits as a number, and how many they are."""


class NoCodeError(Exception):
    """A file's own Huffman tables lack a symbol."""


class FlatMcus:
    """Writes with the tables of these components. Raises NoCodeError where they lack what every MCU needs."""

    def __init__(self, components: list[Component]) -> None:
        self._components = components
        self._ends = [_code(component.ac, END_OF_BLOCK) for component in components]
        ac = components[0].ac
        # coefficients without a zero before them: of each size, the smallest
        sizes = [size for size in range(1, 11) if ac.lengths[size]]
        self._padding = _padding([(ac.codes[size] << size | 1 << (size - 1), ac.lengths[size] + size) for size in sizes])
        self.flat = _stuffed(self._mcu([0] * len(components), (0, 0), 0))
        """An MCU that changes no prediction, in whole bytes."""

    def affixes(self, byte_P: list[int], bit_P: list[int], dc_PC: list[list[int]]) -> tuple[list[bytes], list[bytes]]:
        """Suffixes and prefixes of entry points that lie at a bit of a byte and have a DC prediction.

        A suffix begins with the bits that its byte has before the point, a prefix ends with those that it has after.
        Raises NoCodeError.
        """
        suffixes, prefixes = [], []
        for byte, bit, dc_C in zip(byte_P, bit_P, dc_PC, strict=True):
            suffixes.append(_stuffed(self._mcu([-dc for dc in dc_C], (byte >> (8 - bit), bit), 0)))
            bits, num_bits = self._mcu(dc_C, (0, 0), bit)
            if bit:
                bits, num_bits = bits << (8 - bit) | byte & (0xFF >> bit), num_bits + 8 - bit
            prefixes.append(_stuffed((bits, num_bits)))
        return suffixes, prefixes

    def _mcu(self, diffs_C: list[int], before: _Code, end: int) -> _Code:
        """`before` and an MCU of these DC differences, padded with AC coefficients so that the last byte has `end` bits, or 8."""
        codes: list[_Code] = []
        for diff, end_of_block, (across, down, dc, _) in zip(diffs_C, self._ends, self._components, strict=True):
            size = abs(diff).bit_length()
            codes += _code(dc, size), (diff if diff > 0 else diff + (1 << size) - 1, size), end_of_block
            if across * down > 1:
                codes += (_code(dc, 0), end_of_block) * (across * down - 1)
        num_bits = before[1] + sum(length for _, length in codes)
        codes[2:2] = self._padding[(end - num_bits) % 8]
        bits, num_bits = before
        for code, length in codes:
            bits, num_bits = bits << length | code, num_bits + length
        return bits, num_bits


def _code(table: Huffman, symbol: int) -> _Code:
    if not table.lengths[symbol]:
        raise NoCodeError
    return table.codes[symbol], table.lengths[symbol]


def _padding(codes: list[_Code]) -> list[list[_Code]]:
    """For each number of bits modulo 8 the fewest codes that have as many. Raises NoCodeError."""
    found: dict[int, list[_Code]] = {0: []}
    for _ in range(8):
        for num_bits, chosen in list(found.items()):
            for code in codes:
                found.setdefault((num_bits + code[1]) % 8, [*chosen, code])
    if len(found) < 8:
        raise NoCodeError
    return [found[num_bits] for num_bits in range(8)]


def _stuffed(bits: _Code) -> bytes:
    """Whole bytes as a scan has them."""
    return bits[0].to_bytes(bits[1] // 8, "big").replace(b"\xff", b"\xff\x00")
