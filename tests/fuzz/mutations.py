"""What happens to bytes on disks, in networks and in the hands of adversaries."""

from collections.abc import Callable, Sequence

import numpy as np

_HEADER = 700
"""Bytes at the beginning that hold most of what a parser goes by."""


def mutate(whole: bytes, others: Sequence[bytes], noise: np.random.Generator) -> tuple[str, bytes]:
    """What was done to `whole`, and what became of it; `others` are files to splice it with."""
    if noise.random() < 0.02:
        return "zero length", b""
    name = list(MUTATIONS)[int(noise.integers(len(MUTATIONS)))]
    return name, MUTATIONS[name](whole, others, noise)


def _place(noise: np.random.Generator, whole: bytes) -> int:
    return int(noise.integers(len(whole)))


def _stretch(noise: np.random.Generator, whole: bytes) -> tuple[int, int]:
    """The ends of a part, mostly a short one."""
    begin = _place(noise, whole)
    return begin, min(len(whole), begin + 1 + int(len(whole) ** noise.random()))


def _flip_bits(whole: bytes, others: Sequence[bytes], noise: np.random.Generator) -> bytes:
    mutated = bytearray(whole)
    for _ in range(int(noise.integers(1, 9))):
        mutated[_place(noise, whole)] ^= 1 << int(noise.integers(8))
    return bytes(mutated)


def _overwrite_header(whole: bytes, others: Sequence[bytes], noise: np.random.Generator) -> bytes:
    mutated = bytearray(whole)
    for offset in noise.integers(0, min(len(whole), _HEADER), int(noise.integers(1, 5))).tolist():
        mutated[offset] = int(noise.choice([0, 1, 127, 128, 255, int(noise.integers(256))]))
    return bytes(mutated)


def _truncate(whole: bytes, others: Sequence[bytes], noise: np.random.Generator) -> bytes:
    return whole[: _place(noise, whole)]


def _cut_out(whole: bytes, others: Sequence[bytes], noise: np.random.Generator) -> bytes:
    """So that the file still ends as it should."""
    begin, end = _stretch(noise, whole)
    return whole[:begin] + whole[end:]


def _blank(whole: bytes, others: Sequence[bytes], noise: np.random.Generator) -> bytes:
    """A block that was never written."""
    begin, end = _stretch(noise, whole)
    return whole[:begin] + bytes([int(noise.choice([0, 255]))]) * (end - begin) + whole[end:]


def _repeat(whole: bytes, others: Sequence[bytes], noise: np.random.Generator) -> bytes:
    begin, end = _stretch(noise, whole)
    return whole[:end] + whole[begin:end] * int(noise.integers(1, 40)) + whole[end:]


def _splice(whole: bytes, others: Sequence[bytes], noise: np.random.Generator) -> bytes:
    other = others[int(noise.integers(len(others)))]
    begin, end = _stretch(noise, other)
    if noise.random() < 0.5:
        return whole[: _place(noise, whole)] + other[begin:]
    return whole[: _place(noise, whole)] + other[begin:end] + whole[_place(noise, whole) :]


MUTATIONS: dict[str, Callable[[bytes, Sequence[bytes], np.random.Generator], bytes]] = {
    "bit flips": _flip_bits,
    "header bytes": _overwrite_header,
    "truncated": _truncate,
    "cut out": _cut_out,
    "blank": _blank,
    "repeated": _repeat,
    "spliced": _splice,
}
