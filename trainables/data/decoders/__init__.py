"""The libraries that decode JPEG, by `data.decoder`; `auto` takes the first of them that is installed.

The order is that of measured speed. Milliseconds of CPU an image for a RandomResizedCrop(224) of 500 ImageNet files (mean
110 KB), decoding alone; every one of them gives PIL's pixels, bit for bit:

| decoder      | region | scaled | crop | whole image |
|--------------|--------|--------|------|-------------|
| turbojpeg    | yes    | yes    | 1.00 | 1.33        |
| nvimagecodec | yes    | no     | 1.08 | 1.40        |
| simplejpeg   | no     | yes    | 1.25 | 1.25        |
| torchvision  | no     | no     | 1.35 | 1.35        |
| pil          | no     | no     | 1.88 | 1.88        |

About 0.75 ms of each is Huffman decoding, which no crop shortens.
"""

from __future__ import annotations

from collections.abc import Callable

from trainables.data.decoders.contract import Decoder
from trainables.errors import DataError


def _turbojpeg() -> Decoder:
    from trainables.data.decoders.turbojpeg import TurboJpeg

    return TurboJpeg()


def _nvimagecodec() -> Decoder:
    from trainables.data.decoders.nvimagecodec import NvImageCodec

    return NvImageCodec()


def _simplejpeg() -> Decoder:
    from trainables.data.decoders.simplejpeg import SimpleJpeg

    return SimpleJpeg()


def _torchvision() -> Decoder:
    from trainables.data.decoders.torchvision import Torchvision

    return Torchvision()


def _pil() -> Decoder:
    from trainables.data.decoders.pil import Pil

    return Pil()


DECODERS: dict[str, Callable[[], Decoder]] = {
    "turbojpeg": _turbojpeg,
    "nvimagecodec": _nvimagecodec,
    "simplejpeg": _simplejpeg,
    "torchvision": _torchvision,
    "pil": _pil,
}

_PACKAGES = {"nvimagecodec": "nvidia-nvimgcodec-cu12"}  # where it is not the decoder's name


def open_decoder(name: str) -> Decoder:
    """The decoder of this name, or the fastest one installed for `auto`. Raises DataError where it is not installed."""
    if name != "auto":
        try:
            return DECODERS[name]()
        except ImportError as error:
            raise DataError(
                f"data.decoder: {name} is not installed ({error}); pip install {_PACKAGES.get(name, name)}, or write auto"
            ) from None
    for open_one in DECODERS.values():
        try:
            return open_one()
        except ImportError:
            continue
    raise AssertionError("PIL is a dependency")
