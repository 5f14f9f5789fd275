"""FFCV: `python ffcv_loader.py FOLDER SECONDS`, where FOLDER/train/CLASS/* are JPEG files.

They are packed into FOLDER/images.beton on the first call: JPEG of quality 90, as its users do.
"""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from ffcv.fields import IntField, RGBImageField
from ffcv.fields.decoders import IntDecoder, RandomResizedCropRGBImageDecoder
from ffcv.loader import Loader, OrderOption
from ffcv.transforms import RandomHorizontalFlip, ToTensor
from ffcv.writer import DatasetWriter
from PIL import Image
from window import BATCH, SIZE, THREADS, images_per_s


class Folder:
    """What FFCV's writer reads."""

    def __init__(self, root: Path) -> None:
        self._files = sorted((root / "train").glob("*/*"))

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return Image.open(self._files[index]).convert("RGB"), 0


def pack(root: Path) -> Path:
    packed, unfinished = root / "images.beton", root / "images.part"
    if not packed.exists():
        fields = {"image": RGBImageField(write_mode="jpg", jpeg_quality=90), "label": IntField()}
        DatasetWriter(str(unfinished), fields, num_workers=THREADS).from_indexed_dataset(Folder(root))
        os.replace(unfinished, packed)
    return packed


def batches(root: Path) -> Iterator[int]:
    loader = Loader(
        str(pack(root)),
        batch_size=BATCH,
        num_workers=THREADS,
        order=OrderOption.RANDOM,
        os_cache=True,
        drop_last=True,
        pipelines={
            "image": [RandomResizedCropRGBImageDecoder((SIZE, SIZE)), RandomHorizontalFlip(), ToTensor()],
            "label": [IntDecoder(), ToTensor()],
        },
    )
    while True:
        for images_BHWC, _ in loader:
            assert tuple(images_BHWC.shape) == (BATCH, SIZE, SIZE, 3)
            yield len(images_BHWC)


if __name__ == "__main__":
    print(json.dumps({"images_per_s": images_per_s(batches(Path(sys.argv[1])), float(sys.argv[2]))}))
