"""`distill pack` of 60,000 small JPEGs beside `tar cf` of the same folder, and what opening 1,281,167 records costs.

Both commands from start to end, files in the page cache. The folder is made here: noise on a gradient, 32 pixels a side, of
CIFAR-10's sizes; `RAYDISTILL_BENCH_JPEGS` names another one, with train/CLASS/* and test/CLASS/*.
"""

import contextlib
import io
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

from tests.benchmarks.process import ROOT, answer_of, environment
from tests.benchmarks.rounds import Bar, Comparison, in_turn
from trainables.data.index import File, Index, SplitIndex
from trainables.data.pack.shard import write_rows
from trainables.rundir import write_json

IMAGENET = 1_281_167
OPEN = """
import json, sys, time
from tests.benchmarks.process import peak_rss_mib
import numpy, pyarrow
from trainables.data.sources.records import open_records
empty = peak_rss_mib()
began = time.perf_counter()
source = open_records(sys.argv[1], "train")
seconds = time.perf_counter() - began
print(json.dumps({"seconds": seconds, "mib": peak_rss_mib() - empty, "images": len(source)}))
"""


@contextlib.contextmanager
def comparisons(short: bool) -> Iterator[list[Comparison]]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        given = os.environ.get("RAYDISTILL_BENCH_JPEGS")
        images = Path(given) if given else write_jpegs(folder / "images", 20 if short else 5000)
        many = write_empty_records(folder / "many", 1000 if short else IMAGENET)
        opened: dict[int, float] = {}

        def measure_open(number: int) -> tuple[float, float]:
            answer = answer_of(["-c", OPEN, str(many)])
            opened[number] = answer["mib"]
            return answer["seconds"], 1.0

        yield [
            Comparison(
                "pack, 60,000 JPEGs / tar of the same",
                "s",
                in_turn(partial(packed_s, images, folder), partial(tar_s, images, folder)),
                Bar("≤", 2.0),
            ),
            Comparison("opening 1,281,167 records / 1 s", "s", measure_open, Bar("≤", 1.0)),
            Comparison("memory of that / 100 MiB", "MiB", lambda number: (opened[number], 100.0), Bar("≤", 1.0)),
        ]


def packed_s(images: Path, folder: Path) -> float:
    """Seconds of the whole command, with its verification."""
    shutil.rmtree(folder / "packed", ignore_errors=True)
    return command_s([sys.executable, "-m", "service", "pack", str(images), str(folder / "packed")])


def tar_s(images: Path, folder: Path) -> float:
    """Seconds of `tar`, which verifies nothing and leaves its file to the page cache."""
    (folder / "images.tar").unlink(missing_ok=True)
    return command_s(["tar", "cf", str(folder / "images.tar"), "-C", str(images.parent), images.name])


def command_s(command: list[str]) -> float:
    began = time.perf_counter()
    subprocess.run(command, env=environment(), cwd=ROOT, capture_output=True, check=True)
    return time.perf_counter() - began


def write_jpegs(root: Path, per_class: int) -> Path:
    """Ten classes of `per_class` training images and a fifth of that for test."""
    noise = np.random.default_rng(0)
    slope = np.linspace(0, 160, 32, dtype=np.int16)
    for split, count in (("train", per_class), ("test", per_class // 5)):
        for name in range(10):
            folder = root / split / f"class{name}"
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = slope[:, None, None] + noise.integers(0, 60, (32, 32, 3), dtype=np.int16) + 3 * name
                buffer = io.BytesIO()
                Image.fromarray(pixels.astype(np.uint8)).save(buffer, "JPEG", quality=75)
                (folder / f"{number:05}.jpg").write_bytes(buffer.getvalue())
    return root


def write_empty_records(root: Path, count: int) -> Path:
    """A packed set of `count` images of which only rows and empty shards exist: opening reads no more."""
    root.mkdir()
    shards = []
    for number, first in enumerate(range(0, count, 8192)):
        rows = min(8192, count - first)
        file = File(file=f"train-{number:05}.arrow", rows=rows, bytes=rows * 100, sha256="0" * 64)
        with open(root / file.file, "wb") as sparse:
            sparse.truncate(file.bytes)
        shards.append(file)
    place_n = np.arange(count, dtype=np.int64)
    rows_5n = np.stack([place_n % 1000, place_n % 8192 * 100, np.full_like(place_n, 100), *([np.full_like(place_n, 32)] * 2)])
    split = SplitIndex(rows=write_rows(root / "train.rows.arrow", [rows_5n]), shards=tuple(shards))
    index = Index(
        image="file",
        mode={},
        source={"kind": "made up"},
        raydistill="0",
        num_unreadable=0,
        classes=tuple(f"class{label}" for label in range(1000)),
        splits={"train": split, "val": split},
    )
    write_json(root / "index.json", index.model_dump(mode="json"))
    return root
