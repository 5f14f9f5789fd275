"""`gpu`: nvJPEG through nvImageCodec; on the CPU nvImageCodec's own decoder, whose pixels are PIL's, by the same code."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from nvidia import nvimgcodec
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from trainables.data.jpeg import Box, Region

_AS_PIL = ":fancy_upsampling=1 :fast_idct=0 :enable_roi_fancy_upsampling=1"
_MARGIN = 4
"""Pixels around a region that are decoded with it, and left out: nvJPEG before 13.2 is wrong in the outermost sample of a chroma
plane, which is up to 4 pixels wide."""


class NvImageCodec:
    """A RegionDecoder. Raises RuntimeError where it finds no driver for `device`, a GPU by its number or the CPU."""

    def __init__(self, device: torch.device, threads: int) -> None:
        kinds, on = nvimgcodec.BackendKind, nvimgcodec.NVIMGCODEC_DEVICE_CPU_ONLY
        backends = [kinds.CPU_ONLY]
        if device.type == "cuda":
            on = device.index
            backends = [kinds.HW_GPU_ONLY, kinds.GPU_ONLY, kinds.HYBRID_CPU_GPU]
        self._device = device
        self._decoder = nvimgcodec.Decoder(
            device_id=on, max_num_cpu_threads=threads, options=_AS_PIL, backends=[nvimgcodec.Backend(kind) for kind in backends]
        )
        self._params = nvimgcodec.DecodeParams(apply_exif_orientation=False, color_spec=nvimgcodec.ColorSpec.SRGB)

    def decode(self, regions: list[Region]) -> list[Tensor | None]:
        streams, positions = [], []
        pixels: list[Tensor | None] = [None] * len(regions)
        for position, region in enumerate(regions):
            if (stream := code_stream(region)) is not None:
                streams.append(stream)
                positions.append(position)
        on_gpu = self._device.type == "cuda"
        cuda_stream = torch.cuda.current_stream(self._device).cuda_stream if on_gpu else 0
        images: list[Any] = self._decoder.decode(streams, params=self._params, cuda_stream=cuda_stream) if streams else []
        for position, image in zip(positions, images, strict=True):
            region = regions[position]
            (left, top, right, bottom), (x, y, end_x, end_y) = region.box, decoded_box(region)
            if image is not None and tuple(image.shape) == (end_y - y, end_x - x, 3):
                rgb_hwc = from_dlpack(image) if on_gpu else torch.from_numpy(np.asarray(image))
                pixels[position] = rgb_hwc[top - y : bottom - y, left - x : right - x]
        return pixels


def decoded_box(region: Region) -> Box:
    """The region and the margin around it that the image has."""
    left, top, right, bottom = region.box
    width, height = region.header.width, region.header.height
    return max(0, left - _MARGIN), max(0, top - _MARGIN), min(width, right + _MARGIN), min(height, bottom + _MARGIN)


def code_stream(region: Region) -> Any | None:
    """A region and its margin as nvImageCodec takes them; None where it refuses the header, or finds another size than we did."""
    left, top, right, bottom = decoded_box(region)
    try:
        stream = nvimgcodec.CodeStream(np.frombuffer(region.data, dtype=np.uint8))
        if (stream.height, stream.width) == (region.header.height, region.header.width):
            return stream.get_sub_code_stream(region=nvimgcodec.Region(top, left, bottom, right))
    except (RuntimeError, ValueError):
        pass
    return None
