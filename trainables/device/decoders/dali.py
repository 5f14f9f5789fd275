"""`dali`: NVIDIA DALI's decoder of slices, on a GPU (`mixed`) or, by the same code, on the CPU, where its pixels are PIL's.

DALI gets the files and the boxes, and returns their pixels; order, crops, labels and the size of a batch are the loader's. Its
own resize is not used: beyond an image's edge it repeats the last pixel, where torchvision and PIL let it count no more than
the others, which is up to 15 levels in a batch's outermost pixels (500 ImageNet files at 224 px).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from nvidia.dali import Pipeline, fn, types
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from trainables.data.encoded_rows import Region
from trainables.device.decoders.nvimagecodec import code_stream
from trainables.failures import kind_of

_MAX_IMAGES = 128  # that are decoded at once: with one bad file among them, all of these are for the CPU


class Dali:
    """A RegionDecoder. Raises RuntimeError where DALI finds no driver for `device`, a GPU by its number or the CPU."""

    def __init__(self, device: torch.device, threads: int) -> None:
        self._device, self._threads = device, threads
        self._pipeline: Any = self._build()

    def decode(self, regions: list[Region]) -> list[Tensor | None]:
        """See RegionDecoder. Where DALI fails at a file, it decodes no other file of the same run: all of those are None."""
        pixels: list[Tensor | None] = [None] * len(regions)
        # DALI 2.4 crashes in the run after one that met a header which its parser, nvImageCodec's, refuses
        positions = [position for position, region in enumerate(regions) if code_stream(region) is not None]
        for start in range(0, len(positions), _MAX_IMAGES):
            part = positions[start : start + _MAX_IMAGES]
            for position, rgb_hwc in zip(part, self._run([regions[position] for position in part]), strict=False):
                left, top, right, bottom = regions[position].box
                if rgb_hwc.shape == (bottom - top, right - left, 3):
                    pixels[position] = rgb_hwc
        return pixels

    def _run(self, regions: list[Region]) -> list[Tensor]:
        """The pixels of all regions, of one or more; [] where DALI fails at one."""
        starts = [np.array([top, left], dtype=np.int32) for _, _, _, (left, top, _, _), _ in regions]
        ends = [np.array([bottom, right], dtype=np.int32) for _, _, _, (_, _, right, bottom), _ in regions]
        files = [np.frombuffer(region.data, dtype=np.uint8) for region in regions]
        try:
            # without a stream it returns when all is decoded, on whatever stream of its own
            (images,) = self._pipeline.run(files=files, starts=starts, ends=ends)
        except RuntimeError as error:  # after which a pipeline is of no use
            if kind_of(error) in ("out_of_memory", "device"):  # decoding on the CPU instead, batch after batch, would hide it
                raise
            self._pipeline = None  # before the next one takes as much memory
            self._pipeline = self._build()
            return []
        return [from_dlpack(image) for image in images]

    def _build(self) -> Any:
        on_gpu = self._device.type == "cuda"
        # the default executor: its outputs live as long as something refers to them, also over the next run
        pipeline = Pipeline(
            batch_size=_MAX_IMAGES,
            num_threads=self._threads,
            device_id=self._device.index if on_gpu else None,
            prefetch_queue_depth=1,
        )
        with pipeline:
            files = fn.external_source(name="files", dtype=types.UINT8, ndim=1)
            starts, ends = (fn.external_source(name=name, dtype=types.INT32, ndim=1) for name in ("starts", "ends"))
            images = fn.decoders.image_slice(
                files,
                start=starts,
                end=ends,
                axes=[0, 1],
                device="mixed" if on_gpu else "cpu",
                output_type=types.RGB,
                adjust_orientation=False,
                jpeg_fancy_upsampling=True,
                affine=False,  # or the workers of a node would share their first cores
            )
            pipeline.set_outputs(images)
        pipeline.build()
        return pipeline
