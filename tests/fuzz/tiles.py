"""Damaged tiled JPEG files: parts of them through every decoder that is installed.

What lies before the scan has a checksum, so that damage there gives the right pixels or an error. Damage to the scan shows as it
does in a file that is not tiled: never where the whole file, decoded at once, has none.
"""

import functools
import struct
import zlib
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
from numpy.typing import NDArray

from tests.fuzz.mutations import mutate
from tests.fuzz.subject import Input
from tests.trainables.data.photos import encoded, photo
from trainables.data.decode import StoredImage, UnreadableImageError, decode_image
from trainables.data.decoders import DECODERS
from trainables.data.decoders.interface import Box, Decoder
from trainables.data.pack.tiling import tiled

_FILE = "image"
_CRC_AT, _SCAN_AT, _MAP_AT = 14, 22, 33
_ENDS = ((0, 40), (50, 110), (60, 176))  # of a part, across and down: at the left edge, inside, at the right edge


class Tiles:
    """See Subject."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._originals = _originals()
        self._decoders = {name: decoder for name in DECODERS if (decoder := _decoder(name))}

    def make(self, index: int) -> Input:
        noise = np.random.default_rng([self._seed, index])
        kind = list(self._originals)[int(noise.integers(len(self._originals)))]
        whole, others = self._originals[kind][0], [content for content, _ in self._originals.values()]
        scan = _scan(whole)
        part = ("file", "map", "scan", "map, checksum fixed")[int(noise.integers(4))]
        begin, end = {"file": (0, len(whole)), "scan": (scan, len(whole))}.get(part, (_MAP_AT, scan))
        name, damaged = mutate(whole[begin:end], others, noise)
        damaged = whole[:begin] + damaged + whole[end:]
        if part == "map, checksum fixed" and len(damaged) > _MAP_AT:
            damaged = _fixed(damaged, scan + len(damaged) - len(whole))
        return Input((kind, f"{part}: {name}"), {_FILE: damaged})

    def calls(self, given: Input) -> Iterator[Callable[[], list[str]]]:
        data = given.files[_FILE]
        assert data is not None
        for decoder in self._decoders.values():
            yield partial(self._see, given.kind, data, decoder, _ENDS[zlib.crc32(data) % 3])

    def _see(self, kind: tuple[str, str], data: bytes, decoder: Decoder, ends: tuple[int, int]) -> list[str]:
        whole, whole_HWC = self._originals[kind[0]]
        stored = StoredImage(data, decoder)
        box = ends[0], ends[0], min(stored.width, ends[1]), min(stored.height, ends[1])
        if box[2] <= box[0] or box[3] <= box[1]:
            return []
        ours_HWC = stored.part(box)
        expected_HWC = _part(whole_HWC, box)
        if "fixed" in kind[1] or np.array_equal(ours_HWC, expected_HWC):
            return [""]
        scan = _scan(whole)
        assert data[:scan] != whole[:scan] or data[scan:] != whole[scan:]
        assert not _shows(data, whole_HWC), "another image, where the whole file shows the right one"
        assert not data.startswith(whole[:_CRC_AT]) or data[:scan] == whole[:scan], "another image from a damaged map"
        return [""]


def _shows(data: bytes, whole_HWC: NDArray[np.uint8]) -> bool:
    try:
        return np.array_equal(np.asarray(decode_image(data)), whole_HWC)
    except UnreadableImageError:
        return False


def _part(rgb_HWC: NDArray[np.uint8], box: Box) -> NDArray[np.uint8]:
    return rgb_HWC[box[1] : box[3], box[0] : box[2]]


def _scan(content: bytes) -> int:
    (scan,) = struct.unpack_from(">I", content, _SCAN_AT)
    return int(scan)


def _fixed(damaged: bytes, scan: int) -> bytes:
    """With the sizes and the checksum of what it is now, as an adversary would write it."""
    fixed = bytearray(damaged)
    struct.pack_into(">II", fixed, _CRC_AT + 4, len(fixed), max(0, scan))
    struct.pack_into(">I", fixed, _CRC_AT, zlib.crc32(fixed[_CRC_AT + 4 : max(0, scan)]))
    return bytes(fixed)


@functools.cache
def _originals() -> dict[str, tuple[bytes, NDArray[np.uint8]]]:
    """Tiled files by kind, and their pixels."""
    image = photo(1, 176, 176)
    files = {
        "4:2:0": encoded(image, "JPEG", quality=95),
        "4:4:4": encoded(image, "JPEG", quality=90, subsampling=0),
        "gray": encoded(image.convert("L"), "JPEG", quality=95),
    }
    made = {kind: tiled(content) for kind, content in files.items()}
    return {kind: (content, np.asarray(decode_image(content))) for kind, content in made.items() if content}


def _decoder(name: str) -> Decoder | None:
    try:
        return DECODERS[name]()
    except ImportError:
        return None
