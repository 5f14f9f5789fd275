"""The libraries that decode JPEG, by `data.decoder`; `auto` takes the first of them that is installed.

`gpu` and `dali` are none of them: training's crops are decoded on the device (`trainables.device`), and these do the rest.

The order is that of measured speed: milliseconds of CPU for a RandomResizedCrop(224), linear resize included, of 167 ImageNet
files of 110 KB in the mean. Each gives PIL's pixels, bit for bit, where nothing is shrunk:

| decoder      | region | shrinks | ms   |
|--------------|--------|---------|------|
| turbojpeg    | yes    | yes     | 1.02 |
| nvimagecodec | yes    | no      | 1.06 |
| simplejpeg   | no     | yes     | 1.22 |
| pil          | no     | no      | 1.74 |

Some 0.75 ms of it is Huffman decoding of what lies above and beside the crop too, which no crop avoids. Images of CIFAR's
size: 25, 38, 19 and 80 µs.
"""

from __future__ import annotations

from collections.abc import Callable

from trainables.config import ON_DEVICE
from trainables.data.decoders.interface import Decoder
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


def _pil() -> Decoder:
    from trainables.data.decoders.pil import Pil

    return Pil()


DECODERS: dict[str, Callable[[], Decoder]] = {
    "turbojpeg": _turbojpeg,
    "nvimagecodec": _nvimagecodec,
    "simplejpeg": _simplejpeg,
    "pil": _pil,
}

_PACKAGES = {"nvimagecodec": "nvidia-nvimgcodec-cu12"}  # where it is not the decoder's name


def open_decoder(name: str) -> Decoder:
    """The decoder of this name, or the fastest one installed for `auto` and for the CPU's part where a device decodes.

    Raises DataError where it is not installed.
    """
    if name not in ("auto", *ON_DEVICE):
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
