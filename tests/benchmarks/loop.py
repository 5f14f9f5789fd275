"""Our loop in Ray Train workers beside a plain torch script of the same work: images per second."""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from service.cluster.connect import connect
from tests.benchmarks.pairs import Pair
from tests.benchmarks.rounds import Bar, Comparison, in_turn


@contextlib.contextmanager
def comparisons(short: bool) -> Iterator[list[Comparison]]:
    """One Ray for all rounds; its processes stand beside the plain script too."""
    resnets = Pair("resnet20", "resnet8", 32, 64, warmup_steps=10, steps=10 if short else 100)
    with tempfile.TemporaryDirectory() as name, connect(4, Path(name)):
        yield [compare(resnets, num_workers, Path(name)) for num_workers in ((2,) if short else (1, 2))]


def compare(pair: Pair, num_workers: int, folder: Path) -> Comparison:
    """One pair of models at one world size."""
    return Comparison(
        f"loop, {pair.teacher} → {pair.student}, {num_workers} worker{'s' if num_workers > 1 else ''}",
        "images/s",
        in_turn(
            lambda: pair.ours(folder, num_workers)["images_per_s"],
            lambda: pair.plain(num_workers)["images_per_s"],
        ),
        Bar("≥", 0.97),
    )
