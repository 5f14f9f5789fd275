"""Just enough of Protocol Buffers' wire format (https://protobuf.dev/programming-guides/encoding) to take two messages apart.

Both are fixed for a decade: TensorFlow's Example and Caffe's Datum. Fields that are not used are skipped, not copied.
"""

from collections.abc import Iterator
from dataclasses import dataclass

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


class WireError(ValueError):
    """Bytes that are no message."""


def fields(message: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Each field's number and value: an integer, or the bytes of a string, a message, a packed list or a fixed-width number.

    Raises WireError where the bytes end too early, or hold what no message has.
    """
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        number, kind = key >> 3, key & 7
        if not number:
            raise WireError("field number 0")
        if kind == _VARINT:
            value, at = _varint(message, at)
            yield number, value
            continue
        if kind == _BYTES:
            size, at = _varint(message, at)
        elif kind in (_FIXED64, _FIXED32):
            size = 8 if kind == _FIXED64 else 4
        else:
            raise WireError(f"wire type {kind}")
        if size > len(message) - at:
            raise WireError("cut off")
        yield number, message[at : at + size]
        at += size


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if at >= len(message) or shift > 63:
            raise WireError("cut off")
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


def _bytes(value: int | memoryview) -> memoryview:
    if isinstance(value, int):
        raise WireError("a number where bytes belong")
    return value


def example_features(message: memoryview) -> dict[str, list[memoryview] | list[int]]:
    """A `tensorflow.Example`: its features of bytes and of integers by name; those of floats are left out. Raises WireError."""
    features: dict[str, list[memoryview] | list[int]] = {}
    for number, value in fields(message):
        if number != 1:
            continue
        for entry_number, entry in fields(_bytes(value)):
            if entry_number != 1:
                continue
            parts = dict(fields(_bytes(entry)))
            name = bytes(_bytes(parts.get(1, memoryview(b"")))).decode(errors="replace")
            for kind, content in fields(_bytes(parts.get(2, memoryview(b"")))):
                if kind == 1:
                    features[name] = [_bytes(item) for item_number, item in fields(_bytes(content)) if item_number == 1]
                elif kind == 3:
                    features[name] = _integers(_bytes(content))
    return features


def _integers(message: memoryview) -> list[int]:
    """An `Int64List`, packed or not."""
    values: list[int] = []
    for number, value in fields(message):
        if number != 1:
            continue
        if isinstance(value, int):
            values.append(_signed(value))
            continue
        at = 0
        while at < len(value):
            item, at = _varint(value, at)
            values.append(_signed(item))
    return values


@dataclass(frozen=True)
class Datum:
    """A `caffe.Datum`: an encoded image, or channels × height × width bytes of pixels."""

    channels: int
    height: int
    width: int
    data: memoryview
    label: int
    encoded: bool


def parse_datum(message: memoryview) -> Datum:
    """Raises WireError where the bytes are no Datum that holds bytes of an image."""
    found: dict[int, int | memoryview] = dict(fields(message))
    numbers = [found.get(number, 0) for number in (1, 2, 3, 5, 7)]
    data = found.get(4)
    if not isinstance(data, memoryview) or not len(data) or not all(isinstance(number, int) for number in numbers):
        raise WireError("no Datum with bytes of an image")
    channels, height, width, label, encoded = (int(number) for number in numbers)  # type: ignore[arg-type]
    if not encoded and len(data) != channels * height * width:
        raise WireError("a Datum whose pixels are not channels × height × width")
    return Datum(channels, height, width, data, _signed(label), bool(encoded))
