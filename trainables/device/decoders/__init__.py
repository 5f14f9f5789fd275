"""The libraries that decode regions on a device, by `data.decoder`; none of them need be installed where no device decodes.

Shapes: h w pixels of a region.
"""

from collections.abc import Callable
from typing import Protocol

import torch
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


def _nvimagecodec(device: torch.device, threads: int) -> RegionDecoder:
    from trainables.device.decoders.nvimagecodec import NvImageCodec

    return NvImageCodec(device, threads)


def _dali(device: torch.device, threads: int) -> RegionDecoder:
    from trainables.device.decoders.dali import Dali

    return Dali(device, threads)


REGION_DECODERS: dict[str, Callable[[torch.device, int], RegionDecoder]] = {"gpu": _nvimagecodec, "dali": _dali}
"""Each is made of a device and the number of the CPU's threads that it may use.

Raises ImportError where the library is not installed, RuntimeError where it finds no driver.
"""

_CUDA = (torch.version.cuda or "13").partition(".")[0]
PACKAGES = {"gpu": f"nvidia-nvimgcodec-cu{_CUDA}[nvjpeg]", "dali": f"nvidia-dali-cuda{_CUDA}0"}
"""For the CUDA that torch has: another one's libraries would lie beside torch's own, or find no driver."""
