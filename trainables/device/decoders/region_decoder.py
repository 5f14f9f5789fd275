"""The interface of a decoder of regions on a device. Shapes: h w pixels of a region."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from trainables.data.encoded_rows import Region


class RegionDecoder(Protocol):
    """Decodes parts of JPEG files on the device that it was made for, for one thread at a time; see REGION_DECODERS."""

    def decode(self, regions: list[Region]) -> list[Tensor | None]:
        """The pixels of each region, uint8 (h, w, 3) on the device; None where they are for the CPU's decoders to see.

        None says that a file is damaged, or not to the decoder's liking, or came with such a file. Pixels are never turned by
        an EXIF orientation, which torchvision's ImageFolder does not heed either.

        In the order of the device's current stream, whose work must have come to its end before any of the tensors is let
        go: what is let go, the decoder may write to at once, whatever the stream has still to do.
        """
