"""Is the training loop kept fed? CIFAR-10's records at `data.loader_workers: auto`, beside torch's DataLoader over ImageFolder.

One process, no Ray, a compute thread: resnet20 teaches resnet8, batches of 128, pad-crop-flip on both sides. The loop is ours on
both sides; the peer's loader takes the place of ours in it. `--cifar FOLDER` holds train/CLASS/*.jpg and test/CLASS/*.jpg
(without it: images made up on the spot).
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator
from functools import partial
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from torchvision import datasets, transforms

from tests.benchmarks.pack import write_jpegs
from tests.benchmarks.pairs import Pair, train_on
from tests.benchmarks.process import ROOT, answer_of, environment
from tests.benchmarks.rounds import Bar, Comparison, Sides
from tests.trainables.data.image_folder import open_folder
from trainables.config import DataConfig
from trainables.data.index import read_index
from trainables.data.loader.loader import Batch, Loader
from trainables.distributed.group import Group
from trainables.engine.train import build
from trainables.metrics.phase_timer import data_pct
from trainables.worker.trainer import CPU_MALLOC

SIDES = ("records", "1 worker", "2 workers")


@contextlib.contextmanager
def comparisons(short: bool, cifar: Path | None = None) -> Iterator[list[Comparison]]:
    with tempfile.TemporaryDirectory() as name:
        images, packed = cifar or write_jpegs(Path(name) / "images", 40 if short else 1000), Path(name) / "packed"
        command = [sys.executable, "-m", "service", "pack", str(images), str(packed)]
        subprocess.run(command, env=environment(), cwd=ROOT, capture_output=True, check=True)
        work = [str(images.absolute()), str(packed), "3" if short else "40"]
        command = ["-m", "tests.benchmarks.feeding"]
        sides = Sides({side: partial(answer_of, [*command, side, *work], **CPU_MALLOC) for side in SIDES})
        share, fed = (
            sides.pair(SIDES[0], SIDES[1], "data_pct"),
            "images/s in the loop: records at auto / DataLoader over ImageFolder",
        )
        yield [
            Comparison(
                f"data's share of a step, records at auto (peer: DataLoader, {SIDES[1]})",
                "%",
                share,
                Bar("≤", 2.0),
                lambda ours, peer: ours,
                "ours",
            ),
            *(Comparison(f"{fed}, {peer}", "images/s", sides.pair(SIDES[0], peer, "images_per_s"), None) for peer in SIDES[1:]),
        ]


class ImageFolderLoader(Loader):
    """torch's DataLoader over torchvision's ImageFolder, in the place of ours."""

    def __init__(self, folder: str, data: DataConfig, workers: int) -> None:
        super().__init__(open_folder(folder, "train"), data, split="train", seed=0, rank=0, world_size=1, loader_workers=0)
        steps = [transforms.RandomCrop(data.image_size, padding=4), transforms.RandomHorizontalFlip(), transforms.PILToTensor()]
        images = datasets.ImageFolder(f"{folder}/train", transforms.Compose(steps))
        self._batches_of_torch = DataLoader(
            images, data.global_batch_size, shuffle=True, drop_last=True, num_workers=workers, persistent_workers=True
        )

    def epoch(self, epoch: int, start: int = 0) -> Generator[Batch, None, None]:
        position = start
        for images_BCHW, labels_B in self._batches_of_torch:
            position += len(labels_B)
            yield Batch(images_BCHW, labels_B, torch.arange(len(labels_B)), position)


def measure(side: str, folder: str, packed: str, steps: int) -> dict[str, float]:
    """Images/s of the loop, and the share of its steps that waits for data."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        pair = Pair("resnet20", "resnet8", 32, 128, warmup_steps=8, steps=steps)
        config = pair.config(Path(name), num_workers=1, classes=read_index(Path(packed)).classes)
        # as many as `auto` reserves
        reading = {"path": packed, "augment": "pad_crop_flip", "loader_workers": min(8, max(1, (os.cpu_count() or 1) - 1))}
        config = config.model_copy(update={"data": config.data.model_copy(update=reading)})
        job = build(config, Group(), lambda *_: None, lambda whole=False: {})
        if side != SIDES[0]:
            job.train_loader.close()
            job.train_loader = ImageFolderLoader(folder, config.data, int(side.split()[0]))
        train_on(job, pair.warmup_steps + steps)
        job.close()
        return {**job.metrics.throughput.summary(), "data_pct": data_pct(job.metrics.timer.past_warmup.statistics())["data_pct"]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("side", choices=SIDES)
    parser.add_argument("folder")
    parser.add_argument("packed")
    parser.add_argument("steps", type=int)
    print(json.dumps(measure(**vars(parser.parse_args()))))
