"""Rows of a batch that a loader leaves to the device: encoded, with the part of each image that is to be shown."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from trainables.data.decoders.interface import Box, JpegHeader


class Region(NamedTuple):
    """A row of a batch: `box` of a JPEG file, to be resized to the batch's pixels and, with `flip`, mirrored."""

    row: int
    data: bytes | memoryview
    header: JpegHeader
    box: Box
    flip: bool


class EncodedRows(NamedTuple):
    """The rows of one batch that are not decoded, in order."""

    decoder: str
    """What decodes them, by its name in REGION_DECODERS."""
    regions: list[Region]
    threads: int
    """How many threads of the CPU the device's decoder may use."""
    skip: Callable[[Mapping[int, str]], None]
    """Counts rows that turn out to hold no whole image, row → reason; whoever decodes leaves them out of the batch.

    Raises DataError where they are too many, as the loader does. Only in the thread that iterates over the loader.
    """
