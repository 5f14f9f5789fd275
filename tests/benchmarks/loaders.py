"""One loader's speed, in a process of its own: images/s into this process, for `input`.

`python -m tests.benchmarks.loaders SIDE FOLDER --seconds S`; FOLDER/train/CLASS/* are images.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from torchvision import datasets, transforms

from tests.benchmarks.peers.window import BATCH, SIZE, THREADS, images_per_s
from trainables.config import DataConfig
from trainables.data.folder import FolderSource
from trainables.data.loader import Loader


def ours(folder: Path, fidelity: str, decoder: str) -> Iterator[torch.Tensor]:
    data = DataConfig.model_validate(
        {"path": str(folder), "image_size": SIZE, "augment": "crop_flip", "global_batch_size": BATCH,
         "fidelity": fidelity, "decoder": decoder}
    )  # fmt: skip
    source = FolderSource(str(folder), "train")
    loader = Loader(source, data, split="train", seed=0, rank=0, world_size=1, loader_workers=THREADS)
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


def counted(batches: Iterator[torch.Tensor]) -> Iterator[int]:
    for images_BCHW in batches:
        assert images_BCHW.shape == (BATCH, 3, SIZE, SIZE)
        assert images_BCHW.dtype == torch.uint8
        yield len(images_BCHW)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("side", help="reference, or fast or exact, with :DECODER")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, required=True)
    args = parser.parse_args()
    fidelity, _, decoder = args.side.partition(":")
    batches = reference(args.folder) if fidelity == "reference" else ours(args.folder, fidelity, decoder or "auto")
    print(json.dumps({"images_per_s": images_per_s(counted(batches), args.seconds)}))
