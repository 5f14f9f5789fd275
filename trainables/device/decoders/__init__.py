"""The libraries that decode regions on a device, by `data.decoder`; none of them need be installed where no device decodes."""

from __future__ import annotations

from collections.abc import Callable

import torch

from trainables.device.decoders.region_decoder import RegionDecoder


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

PACKAGES = {"gpu": "nvidia-nvimgcodec-cu12[nvjpeg]", "dali": "nvidia-dali-cuda120"}
