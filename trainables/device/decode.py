"""JPEG crops decoded and resized on the device, for `data.decoder: gpu`: nvJPEG through nvImageCodec, then torch.

Shapes: R regions, B rows of a batch, C=3 channels, H W pixels of the batch, h w those of a region.
"""

from __future__ import annotations

import atexit
import functools
import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from trainables.config import DataConfig
from trainables.data.augment import cut
from trainables.data.decode import StoredImage, UnreadableImageError
from trainables.data.decoders import GPU, open_decoder
from trainables.data.decoders.contract import read_header
from trainables.data.undecoded import Region
from trainables.errors import DataError

_AS_PIL = ":fancy_upsampling=1 :fast_idct=0"
_MOST_PIXELS = 2**26  # that are decoded at once, 3 bytes each; a batch of photos has less


class RegionDecoder:
    """Decodes regions on `device` (a GPU by its number), for one thread at a time.

    On a GPU the pixels are nvJPEG's; on the CPU those of nvImageCodec's own decoder, which are PIL's, by the same code. What
    it does not take, or fails at, is decoded as elsewhere, in the calling thread. Resized antialiased, as by `resize_exact`,
    whatever `data.fidelity` says.

    Raises ImportError where nvImageCodec is not installed, RuntimeError where it finds no driver.
    """

    def __init__(self, device: torch.device, threads: int) -> None:
        from nvidia import nvimgcodec  # where no GPU decodes it need not be installed

        kinds, on = nvimgcodec.BackendKind, nvimgcodec.NVIMGCODEC_DEVICE_CPU_ONLY
        backends = [kinds.CPU_ONLY]
        if device.type == "cuda":
            on = device.index
            backends = [kinds.HW_GPU_ONLY, kinds.GPU_ONLY, kinds.HYBRID_CPU_GPU]
        self._codec, self._device = nvimgcodec, device
        self._decoder = nvimgcodec.Decoder(
            device_id=on, max_num_cpu_threads=threads, options=_AS_PIL, backends=[nvimgcodec.Backend(kind) for kind in backends]
        )
        # it would turn images by their EXIF orientation, which torchvision's ImageFolder does not
        self._params = nvimgcodec.DecodeParams(apply_exif_orientation=False, color_spec=nvimgcodec.ColorSpec.SRGB)
        self._cpu = open_decoder(GPU)

    def decode(self, regions: list[Region]) -> list[Tensor | None]:
        """The pixels of each region, uint8 (h, w, 3) on the device; None where the file is damaged or not to its liking.

        In the order of the current stream, whose work must have come to its end before any of the tensors is let go: the
        hardware decoder writes at once, whatever the stream has still to do, and what is let go it may be given to write to.
        """
        streams, places = [], []
        pixels: list[Tensor | None] = [None] * len(regions)
        for place, (_, data, header, (left, top, right, bottom), _) in enumerate(regions):
            try:
                stream = self._codec.CodeStream(np.frombuffer(data, dtype=np.uint8))
                if (stream.height, stream.width) == (header.height, header.width):
                    streams.append(stream.get_sub_code_stream(region=self._codec.Region(top, left, bottom, right)))
                    places.append(place)
            except (RuntimeError, ValueError):
                continue
        on_gpu = self._device.type == "cuda"
        cuda_stream = torch.cuda.current_stream(self._device).cuda_stream if on_gpu else 0
        images: list[Any] = self._decoder.decode(streams, params=self._params, cuda_stream=cuda_stream) if streams else []
        for place, image in zip(places, images, strict=True):
            left, top, right, bottom = regions[place].box
            if image is not None and tuple(image.shape) == (bottom - top, right - left, 3):
                pixels[place] = from_dlpack(image) if on_gpu else torch.from_numpy(np.asarray(image))
        return pixels

    def fill(self, regions: list[Region], out_BCHW: Tensor) -> dict[int, str]:
        """Show each region in its row of `out_BCHW` (uint8, on the device), in the order of the current stream.

        Returns row → reason for those that hold no whole image, whose rows are undefined. Returns, on a GPU, when the current
        stream has done all that it had to do.
        """
        size = out_BCHW.shape[-2:]
        shown_RCHW = torch.empty((len(regions), 3, *size), device=self._device)
        shown, failed = list[Region](), list[Region]()
        for part in _parts(regions):
            pixels = self.decode(part)
            for region, rgb_hwc in zip(part, pixels, strict=True):
                if rgb_hwc is None:
                    failed.append(region)
                    continue
                rgb_1Chw = rgb_hwc.permute(2, 0, 1)[None].to(torch.float32, memory_format=torch.contiguous_format)
                place_1CHW = shown_RCHW[len(shown) : len(shown) + 1]
                torch.ops.aten._upsample_bilinear2d_aa.out(rgb_1Chw, size, False, None, None, out=place_1CHW)
                shown.append(region)
            self._finish()
            del pixels
        shown_RCHW = shown_RCHW[: len(shown)]
        rows_R, flips_R = (
            torch.tensor(values, device=self._device)
            for values in ([region.row for region in shown], [region.flip for region in shown])
        )
        if shown:
            shown_RCHW = torch.where(flips_R[:, None, None, None], shown_RCHW.flip(3), shown_RCHW)
            out_BCHW.index_copy_(0, rows_R, shown_RCHW.round_().to(torch.uint8))
        bad = self._fill_on_cpu(failed, out_BCHW)
        self._finish()
        return bad

    def _fill_on_cpu(self, regions: list[Region], out_BCHW: Tensor) -> dict[int, str]:
        bad = {}
        out_HWC = np.empty((*out_BCHW.shape[-2:], 3), dtype=np.uint8)
        for region in regions:
            try:
                cut(StoredImage(region.data, self._cpu), region.box, region.flip, out_HWC, exact=True)
            except UnreadableImageError as error:
                bad[region.row] = str(error)
            else:
                out_BCHW[region.row].copy_(torch.from_numpy(out_HWC).permute(2, 0, 1))
        return bad

    def _finish(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()


def _parts(regions: list[Region]) -> Iterator[list[Region]]:
    """`regions` in order, in parts of no more than `_MOST_PIXELS`, or of a single one."""
    part, pixels = list[Region](), 0
    for region in regions:
        left, top, right, bottom = region.box
        more = (right - left) * (bottom - top)
        if part and pixels + more > _MOST_PIXELS:
            yield part
            part, pixels = [], 0
        part.append(region)
        pixels += more
    if part:
        yield part


@functools.cache
def region_decoder(device: torch.device, threads: int) -> RegionDecoder:
    """The decoder of this device; making one takes as long as many batches. Raises as RegionDecoder does."""
    return RegionDecoder(device, threads)


atexit.register(region_decoder.cache_clear)  # before CUDA ends


def check_decoder(data: DataConfig, device: torch.device, threads: int) -> None:
    """Refuse `data.decoder: gpu` where it would decode nothing. Raises DataError."""
    if data.decoder != GPU:
        return
    if device.type != "cuda":
        raise DataError("data.decoder: gpu needs a worker with a GPU, and this one trains on the CPU; write data.decoder=auto")
    try:
        decoder = region_decoder(device, threads)
    except (ImportError, RuntimeError) as error:
        reason = str(error).splitlines()[0]
    else:
        if _decodes(decoder):
            return
        reason = "nvJPEG decodes nothing"
    raise DataError(
        f"data.decoder: gpu cannot be used on this node ({reason}); pip install nvidia-nvimgcodec-cu12[nvjpeg], "
        "or write data.decoder=auto"
    )


def _decodes(decoder: RegionDecoder) -> bool:
    """Whether it does anything itself: without the nvJPEG library, nvImageCodec starts, and then fails at each image."""
    file = io.BytesIO()
    Image.new("RGB", (64, 64), (200, 30, 90)).save(file, "JPEG")
    data = file.getvalue()
    header = read_header(data)
    assert header is not None
    return decoder.decode([Region(0, data, header, (0, 0, 64, 64), False)])[0] is not None
