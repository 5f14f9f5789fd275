"""Rows of a batch that the loader leaves encoded for the device, each with the box to decode."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from trainables.data.jpeg import Box, JpegHeader


class Region(NamedTuple):
    """A row of a batch: the `box` of a JPEG to decode, resize to the batch's image size and, with `flip`, mirror."""

    row: int
    data: bytes | memoryview
    header: JpegHeader
    box: Box
    flip: bool


class EncodedRows(NamedTuple):
    """The encoded rows of one batch, in order."""

    regions: list[Region]
    threads: int
    """The number of CPU threads that the device's decoder may use."""
    skip: Callable[[Mapping[int, str]], None]
    """Counts unreadable rows, row → reason; the decoder leaves them out of the batch.

    Raises DataError if there are too many, as the loader does. Call it only in the thread that iterates over the loader.
    """
