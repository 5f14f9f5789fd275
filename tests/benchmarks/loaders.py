"""One loader's speed, in a process of its own: images/s into this process, for `input`.

`python -m tests.benchmarks.loaders SIDE FOLDER --seconds S`; FOLDER/train/CLASS/* are images, or FOLDER is a packed set of ours.
"""

import argparse
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader
from torchvision import datasets, transforms

from tests.benchmarks.peers.window import BATCH, SIZE, THREADS, images_per_s
from trainables.config import DataConfig
from trainables.data.augment import random_resized_crop_box, uniforms
from trainables.data.decode import StoredImage
from trainables.data.jpeg import read_header
from trainables.data.loader.loader import Loader
from trainables.data.source import open_source
from trainables.data.turbojpeg import open_decoder

DECODED = 500


def ours(folder: Path, fidelity: str) -> Iterator[torch.Tensor]:
    data = DataConfig.model_validate(
        {
            "path": str(folder),
            "image_size": SIZE,
            "augment": "crop_flip",
            "global_batch_size": BATCH,
            "fidelity": fidelity,
        }
    )
    loader = Loader(open_source(data, "train"), data, split="train", seed=0, rank=0, world_size=1, loader_workers=THREADS)
    for epoch in count():
        for batch in loader.epoch(epoch):
            yield batch.images_BCHW


def reference(folder: Path) -> Iterator[torch.Tensor]:
    """As torchvision's reference script, up to the uint8 tensor."""
    steps = [transforms.RandomResizedCrop(SIZE), transforms.RandomHorizontalFlip(), transforms.PILToTensor()]
    images = datasets.ImageFolder(str(folder / "train"), transforms.Compose(steps))
    loader = DataLoader(images, BATCH, shuffle=True, drop_last=True, num_workers=THREADS, persistent_workers=True)
    while True:
        for images_BCHW, _ in loader:
            yield images_BCHW


def decoding(folder: Path, shrink: int) -> Iterator[int]:
    """What no loader can beat with this decoder: the same crops decoded by threads, from memory, and thrown away.

    With `shrink` 8 nearly all of it is Huffman decoding.
    """
    decoder = open_decoder()
    samples = [data for file in sorted((folder / "train").rglob("*.*"))[:DECODED] if read_header(data := file.read_bytes())]

    def decode(work: tuple[bytes, NDArray[np.float64]]) -> int:
        stored = StoredImage(work[0], decoder)
        stored.decode(random_resized_crop_box(work[1], stored.width, stored.height), shrink)
        return 1

    with ThreadPoolExecutor(THREADS) as pool:
        for epoch in count():
            rows = uniforms(0, epoch, np.arange(len(samples)), 22)
            yield sum(pool.map(decode, zip(samples, rows, strict=True), chunksize=8))


def counted(batches: Iterator[torch.Tensor]) -> Iterator[int]:
    for images_BCHW in batches:
        assert images_BCHW.shape == (BATCH, 3, SIZE, SIZE)
        assert images_BCHW.dtype == torch.uint8
        yield len(images_BCHW)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("side", help="reference, decoding, huffman, fast or exact")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, required=True)
    args = parser.parse_args()
    if args.side in ("decoding", "huffman"):
        batches = decoding(args.folder, 8 if args.side == "huffman" else 1)
    else:
        batches = counted(reference(args.folder) if args.side == "reference" else ours(args.folder, args.side))
    print(json.dumps({"images_per_s": images_per_s(batches, args.seconds)}))
