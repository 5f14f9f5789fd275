"""Our loop in Ray Train workers beside a plain torch script of the same work: images per second.

On noise, which costs no reading; and with two workers on JPEG files: packed in ours, torchvision's ImageFolder in the script. The
script has the allocator that Python finds by itself, and then, on noise, the settings that our workers start with (`CPU_MALLOC`).
"""

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from service.cluster.connect import connect
from tests.benchmarks.pack import write_jpegs
from tests.benchmarks.pairs import Pair
from tests.benchmarks.process import ROOT, environment
from tests.benchmarks.rounds import Bar, Comparison, Sides, in_turn
from trainables.worker.trainer import CPU_MALLOC


@contextlib.contextmanager
def comparisons(short: bool) -> Iterator[list[Comparison]]:
    """One Ray for all rounds; its processes stand beside the plain script too."""
    resnets = Pair("resnet20", "resnet8", 32, 64, warmup_steps=10, steps=10 if short else 100)
    with tempfile.TemporaryDirectory() as name, connect(4, Path(name)):
        root = Path(name)
        images = write_jpegs(root / "images", 40 if short else 1000)
        command = [sys.executable, "-m", "service", "pack", str(images), str(root / "packed")]
        subprocess.run(command, env=environment(), cwd=ROOT, capture_output=True, check=True)
        photos = replace(resnets, images=images, packed=root / "packed")
        yield [
            *(line for num_workers in ((2,) if short else (1, 2)) for line in compare_noise(resnets, num_workers, root)),
            compare_photos(photos, 2, root),
        ]


def compare_noise(pair: Pair, num_workers: int, folder: Path) -> list[Comparison]:
    """One pair of models at one world size, beside the script under either allocator."""
    sides = Sides(
        {
            "ours": lambda: pair.ours(folder, num_workers),
            "plain": lambda: pair.plain(num_workers),
            "as ours": lambda: pair.plain(num_workers, **CPU_MALLOC),
        }
    )
    title = f"loop, {pair.teacher} → {pair.student}, {num_workers} worker{'s' if num_workers > 1 else ''}"
    return [
        Comparison(title, "images/s", sides.pair("ours", "plain", "images_per_s"), Bar("≥", 0.97)),
        Comparison(f"{title}, script with our allocator", "images/s", sides.pair("ours", "as ours", "images_per_s"), None),
    ]


def compare_photos(pair: Pair, num_workers: int, folder: Path) -> Comparison:
    """The same on JPEG files."""
    return Comparison(
        f"loop, {pair.teacher} → {pair.student}, {num_workers} workers, JPEG records / ImageFolder",
        "images/s",
        in_turn(
            lambda: pair.ours(folder, num_workers)["images_per_s"],
            lambda: pair.plain(num_workers)["images_per_s"],
        ),
        Bar("≥", 0.97),
    )
