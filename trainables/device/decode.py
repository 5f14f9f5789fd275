"""JPEG crops decoded and resized on the device, for `data.decoder: gpu`: by nvImageCodec, then torch.

Shapes: R regions, B rows of a batch, C=3 channels, H W pixels of the batch, h w those of a region.
"""

import atexit
import functools
import io
from collections.abc import Iterator
from typing import Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from trainables.config import DataConfig
from trainables.data.augment import render_crop
from trainables.data.decode import StoredImage, UnreadableImageError
from trainables.data.jpeg import Region, read_header
from trainables.data.turbojpeg import open_decoder
from trainables.errors import DataError, first_line
from trainables.failures import kind_of

_MAX_PIXELS = 2**26  # that are decoded at once, 3 bytes each; a batch of photos has less
_CUDA = (torch.version.cuda or "13").partition(".")[0]
PACKAGE = f"nvidia-nvimgcodec-cu{_CUDA}[nvjpeg]"
"""For the CUDA that torch has: another one's libraries would lie beside torch's own, or find no driver."""


class RegionDecoder(Protocol):
    """Decodes parts of JPEG files on the device that it was made for, for one thread at a time."""

    def decode(self, regions: list[Region]) -> list[Tensor | None]:
        """The pixels of each region, uint8 (h, w, 3) on the device; None where they are for the CPU's decoders to see.

        None says that a file is damaged, or not to the decoder's liking. Pixels are never turned by an EXIF orientation, which
        torchvision's ImageFolder does not heed either.

        In the order of the device's current stream, whose work must have come to its end before any of the tensors is let
        go: what is let go, the decoder may write to at once, whatever the stream has still to do.
        """


def decode_regions(decoder: RegionDecoder, regions: list[Region], out_BCHW: Tensor) -> dict[int, str]:
    """Write each region to its row of `out_BCHW` (uint8, on the decoder's device), in the order of the current stream.

    Resized antialiased, as by `resize_exact`, whatever `data.fidelity` says. Other images are decoded on the CPU, in the calling
    thread. Returns row → reason for the regions of files that hold no whole image, whose rows are undefined.
    Returns, on a GPU, when the current stream has done all that it had to do.
    """
    device, size = out_BCHW.device, out_BCHW.shape[-2:]
    resized_RCHW = torch.empty((len(regions), 3, *size), device=device)
    resized, not_decoded = list[Region](), list[Region]()
    for part in _parts(regions):
        pixels = decoder.decode(part)
        for region, rgb_hwc in zip(part, pixels, strict=True):
            if rgb_hwc is None:
                not_decoded.append(region)
                continue
            rgb_1Chw = rgb_hwc.permute(2, 0, 1)[None].to(torch.float32, memory_format=torch.contiguous_format)
            row_1CHW = resized_RCHW[len(resized) : len(resized) + 1]
            torch.ops.aten._upsample_bilinear2d_aa.out(rgb_1Chw, size, False, None, None, out=row_1CHW)
            resized.append(region)
        _finish(device)
        del pixels
    resized_RCHW = resized_RCHW[: len(resized)]
    rows_R = torch.tensor([region.row for region in resized], device=device)
    flips_R = torch.tensor([region.flip for region in resized], device=device)
    if resized:
        resized_RCHW = torch.where(flips_R[:, None, None, None], resized_RCHW.flip(3), resized_RCHW)
        out_BCHW.index_copy_(0, rows_R, resized_RCHW.round_().to(torch.uint8))
    bad = _fill_on_cpu(not_decoded, out_BCHW)
    _finish(device)
    return bad


def _fill_on_cpu(regions: list[Region], out_BCHW: Tensor) -> dict[int, str]:
    bad = {}
    out_HWC = np.empty((*out_BCHW.shape[-2:], 3), dtype=np.uint8)
    for region in regions:
        try:
            render_crop(StoredImage(region.data, open_decoder()), region.box, region.flip, out_HWC, exact=True)
        except UnreadableImageError as error:
            bad[region.row] = str(error)
        else:
            out_BCHW[region.row].copy_(torch.from_numpy(out_HWC).permute(2, 0, 1))
    return bad


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _parts(regions: list[Region]) -> Iterator[list[Region]]:
    """`regions` in order, in parts of no more than `_MAX_PIXELS`, or of a single one."""
    part, pixels = list[Region](), 0
    for region in regions:
        left, top, right, bottom = region.box
        more = (right - left) * (bottom - top)
        if part and pixels + more > _MAX_PIXELS:
            yield part
            part, pixels = [], 0
        part.append(region)
        pixels += more
    if part:
        yield part


def make_decoder(device: torch.device, threads: int) -> RegionDecoder:
    """A decoder that may use so many threads of the CPU.

    Raises ImportError: nvImageCodec is not installed; RuntimeError: it finds no driver.
    """
    from trainables.device.nvimagecodec import NvImageCodec

    return NvImageCodec(device, threads)


@functools.cache
def region_decoder(device: torch.device, threads: int) -> RegionDecoder:
    """See `make_decoder`, which takes as long as many batches."""
    return make_decoder(device, threads)


atexit.register(region_decoder.cache_clear)  # before CUDA ends


def check_decoder(data: DataConfig, device: torch.device, threads: int) -> None:
    """Refuse a `data.decoder` that is to decode on the device where it would decode nothing. Raises DataError."""
    if not data.decodes_on_device:
        return
    if device.type != "cuda":
        raise DataError("data.decoder: gpu needs a worker with a GPU, and this one trains on the CPU; write data.decoder=auto")
    try:
        if _decodes(region_decoder(device, threads)):
            return
        reason = "it decodes nothing"
    except (ImportError, RuntimeError) as error:
        if kind_of(error) == "out_of_memory":
            raise
        reason = first_line(error)
    raise DataError(
        f"data.decoder: gpu cannot be used on this node ({reason}); pip install {PACKAGE}, or write data.decoder=auto"
    )


def _decodes(decoder: RegionDecoder) -> bool:
    """Whether it decodes a region itself: without an nvJPEG that can, nvImageCodec starts, and then fails at each image."""
    file = io.BytesIO()
    Image.new("RGB", (64, 64), (200, 30, 90)).save(file, "JPEG")
    data = file.getvalue()
    header = read_header(data)
    assert header is not None
    return decoder.decode([Region(0, data, header, (16, 16, 48, 48), False)])[0] is not None
