"""Just enough of Protocol Buffers' wire format (https://protobuf.dev/programming-guides/encoding) to take two messages apart.

Both are fixed for a decade: TensorFlow's Example and Caffe's Datum. Not protobuf's own parser, which copies a message as a whole:
to list the labels of a set would read all of its images.
"""

from collections.abc import Iterator
from typing import NamedTuple

_VARINT, _BYTES = 0, 2
_FIXED_BYTES = {1: 8, 5: 4}
Value = int | memoryview


class WireError(ValueError):
    """Bytes that are no message."""


def fields(message: Value) -> Iterator[tuple[int, Value]]:
    """Each field's number and value: an integer, or the bytes of a string, a message, a packed list or a fixed-width number.

    Raises WireError where the bytes end too early, or hold what no message has.
    """
    if isinstance(message, int):
        raise WireError("a number where bytes belong")
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        number, kind = key >> 3, key & 7
        if number <= 0:
            raise WireError(f"field number {number}")
        if kind == _VARINT:
            value, at = _varint(message, at)
            yield number, value
            continue
        if kind == _BYTES:
            size, at = _varint(message, at)
        elif kind in _FIXED_BYTES:
            size = _FIXED_BYTES[kind]
        else:
            raise WireError(f"wire type {kind}")
        if not 0 <= size <= len(message) - at:
            raise WireError("cut off")
        yield number, message[at : at + size]
        at += size


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    """A signed number of 64 bits at a position, and the position behind it."""
    value = shift = 0
    while at < len(message) and shift <= 63:
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return (value & (1 << 63) - 1) - (value & 1 << 63), at
    raise WireError("cut off")


def example_features(message: memoryview) -> dict[str, Value]:
    """A `tensorflow.Example`: the first value of each feature of bytes or of integers by the feature's name. Raises WireError."""
    found: dict[str, Value] = {}
    for entry in (entry for number, features in fields(message) if number == 1 for _, entry in fields(features)):
        parts = dict(fields(entry))
        name = parts.get(1, memoryview(b""))
        for kind, values in fields(parts.get(2, memoryview(b""))):
            first = next((value for number, value in fields(values) if number == 1), None) if kind in (1, 3) else None
            if kind == 3 and isinstance(first, memoryview):
                first = _varint(first, 0)[0] if len(first) else None  # packed
            if first is not None and not isinstance(name, int):
                found[bytes(name).decode(errors="replace")] = first
    return found


class Datum(NamedTuple):
    """A `caffe.Datum`: an encoded image, or channels × height × width bytes of pixels."""

    channels: int
    height: int
    width: int
    data: memoryview
    label: int
    encoded: bool


def parse_datum(message: memoryview) -> Datum:
    """Raises WireError where the bytes are no Datum that holds bytes of an image."""
    found, data = dict(fields(message)), memoryview(b"")
    if isinstance(value := found.get(4), memoryview):
        data = value
    numbers = [number for key in (1, 2, 3, 5, 7) if isinstance(number := found.get(key, 0), int)]
    if not len(data) or len(numbers) < 5:
        raise WireError("no Datum with bytes of an image")
    channels, height, width, label, encoded = numbers
    if not encoded and len(data) != channels * height * width:
        raise WireError("a Datum whose pixels are not channels × height × width")
    return Datum(channels, height, width, data, label, bool(encoded))
