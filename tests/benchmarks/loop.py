"""Our loop in Ray Train workers beside a plain torch script of the same work: images per second.

On noise, which costs no reading; and with two workers on JPEG files: packed in ours, torchvision's ImageFolder in the script.
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
from tests.benchmarks.rounds import Bar, Comparison, in_turn


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
        noise = [compare(resnets, num_workers, root) for num_workers in ((2,) if short else (1, 2))]
        yield [*noise, compare(photos, 2, root)]


def compare(pair: Pair, num_workers: int, folder: Path) -> Comparison:
    """One pair of models at one world size."""
    on = ", JPEG records / ImageFolder" if pair.images else ""
    return Comparison(
        f"loop, {pair.teacher} → {pair.student}, {num_workers} worker{'s' if num_workers > 1 else ''}{on}",
        "images/s",
        in_turn(
            lambda: pair.ours(folder, num_workers)["images_per_s"],
            lambda: pair.plain(num_workers)["images_per_s"],
        ),
        Bar("≥", 0.97),
    )
