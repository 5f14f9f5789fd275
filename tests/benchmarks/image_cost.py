"""What Python costs an image in a loader thread: CPU-seconds outside the calls that decode, resize, flip and read.

One thread, packed JPEG files, random crops at 224. "In place": between calls of a millisecond, after which Python finds little in
the core's caches. "Warm": with a decoder that does nothing. What measuring costs is taken off.
"""

import argparse
import contextlib
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import cv2
import numpy as np

from tests.benchmarks.peers.window import BATCH, SIZE, THREADS
from trainables.config import DataConfig
from trainables.data.augment import Augment, uniforms
from trainables.data.loader.batch_memory import BatchMemory
from trainables.data.loader.batch_reader import CHUNKS_PER_THREAD, BatchReader
from trainables.data.source import open_source
from trainables.data.turbojpeg import TurboJpeg

_WARM_UP = 2  # batches
_LIBRARY_CALLS = ((cv2, "resize"), (cv2, "flip"), (cv2, "warpAffine"), (os, "pread"))


class Clock:
    """Adds up the CPU-seconds of this thread that pass inside some functions."""

    def __init__(self) -> None:
        self.inside_s, self.num_calls = 0.0, 0

    def timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            began_s = time.thread_time()
            result = function(*arguments, **options)
            self.inside_s += time.thread_time() - began_s
            self.num_calls += 1
            return result

        return call


def _overhead_s() -> float:
    """CPU-seconds that a timed call takes outside of what it counts, and more than the call itself."""
    clock = Clock()
    calls = 20_000
    times_s = []
    for function in (clock.timed(int), int):
        began_s = time.thread_time()
        for _ in range(calls):
            function()
        times_s.append(time.thread_time() - began_s)
    return (times_s[0] - clock.inside_s) / calls


@contextlib.contextmanager
def _library_timed(clock: Clock, augment: Augment, *, warm: bool) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for module, name in _LIBRARY_CALLS:
            stack.enter_context(patch.object(module, name, clock.timed(getattr(module, name))))
        decoder = augment._decoder
        assert isinstance(decoder, TurboJpeg)
        library = decoder._library
        decompress = (lambda *arguments: 0) if warm else decoder._decompress
        names = ("tj3Init", "tj3Destroy", "tj3Get", "tj3SetScalingFactor", "tj3SetCroppingRegion")
        others = {name: getattr(library, name) for name in names}
        timed = SimpleNamespace(**others, tj3DecompressHeader=clock.timed(library.tj3DecompressHeader))
        stack.enter_context(patch.object(decoder, "_library", timed))
        stack.enter_context(patch.object(decoder, "_decompress", clock.timed(decompress)))
        yield


def measure(folder: Path, seconds: float, *, warm: bool) -> dict[str, float]:
    """Microseconds an image: medians over batches, and of the batch that was disturbed least."""
    data = DataConfig.model_validate({"path": str(folder), "image_size": SIZE, "augment": "crop_flip"})
    source, clock, overhead_s = open_source(data, "train"), Clock(), _overhead_s()
    memory, rows = BatchMemory(BATCH, SIZE), BATCH // (THREADS * CHUNKS_PER_THREAD)
    reader = BatchReader(memory, source, data, split="train", seed=0, rank=0, world_size=1, threads=0)
    augment = reader._augment
    out_BHWC = np.zeros((BATCH, SIZE, SIZE, 3), dtype=np.uint8)
    images_s, python_s = list[float](), list[float]()
    with _library_timed(clock, augment, warm=warm):
        until_s = time.perf_counter() + seconds
        for number in count():
            indices_B = np.arange(number * BATCH, (number + 1) * BATCH) % len(source)
            clock.inside_s, clock.num_calls, began_s = 0.0, 0, time.thread_time()
            uniforms_BU = uniforms(0, number, indices_B, augment.num_uniforms)
            for row in range(0, BATCH, rows):
                part = slice(row, row + rows)
                reader._fill(1, row, indices_B[part], uniforms_BU[part], out_BHWC[part])
            images_s.append((time.thread_time() - began_s - clock.num_calls * overhead_s) / BATCH)
            python_s.append(images_s[-1] - clock.inside_s / BATCH)
            if time.perf_counter() > until_s and number > _WARM_UP:
                break
    return {
        "image_us": 1e6 * statistics.median(images_s[_WARM_UP:]),
        "python_us": 1e6 * statistics.median(python_s[_WARM_UP:]),
        "least_python_us": 1e6 * min(python_s[_WARM_UP:]),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--warm", action="store_true")
    args = parser.parse_args()
    print(json.dumps(measure(args.folder, args.seconds, warm=args.warm)))
