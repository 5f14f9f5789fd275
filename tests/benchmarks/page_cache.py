"""What the page cache and its hints do for a packed set on a disk: samples read at random or in order, cold and warm.

    python -m tests.benchmarks.page_cache FOLDER    a packed set; --seconds of reading a point, --threads

Cold: every page of the shards is dropped first (`POSIX_FADV_DONTNEED`, which works on clean pages without root), and each way
reads samples that no earlier way has read. Prints one line a way: images/s, MiB/s of samples, and disk bytes ÷ sample bytes.
"""

import argparse
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from trainables.data.index import read_index
from trainables.data.order import Order
from trainables.data.sources.records import RecordsSource, open_records

BATCH, AHEAD = 64, 4


class Way(NamedTuple):
    """A way of reading: the order, the advice at opening, and whether the samples of the next batches are asked for."""

    name: str
    shuffle: str
    advice: int
    ask_ahead: bool = False


WAYS = (
    Way("full shuffle", "full", os.POSIX_FADV_NORMAL),
    Way("full shuffle, RANDOM", "full", os.POSIX_FADV_RANDOM),
    Way("full shuffle, WILLNEED a batch ahead", "full", os.POSIX_FADV_NORMAL, True),
    Way("full shuffle, RANDOM, WILLNEED a batch ahead", "full", os.POSIX_FADV_RANDOM, True),
    Way("window(2048)", "window(2048)", os.POSIX_FADV_NORMAL),
    Way("window(2048), WILLNEED a batch ahead", "window(2048)", os.POSIX_FADV_NORMAL, True),
    Way("in stored order", "none", os.POSIX_FADV_NORMAL),
    Way("in stored order, SEQUENTIAL", "none", os.POSIX_FADV_SEQUENTIAL),
)


def drop(paths: list[Path]) -> None:
    """Drop the files' pages from the cache."""
    for path in paths:
        handle = os.open(path, os.O_RDONLY)
        os.fdatasync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)


def disk_bytes() -> int:
    """What this process has caused the disks to read."""
    return int(dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())["read_bytes"])


def measure(paths: list[Path], source: RecordsSource, way: Way, threads: int, seconds: float, epoch: int) -> str:
    """Read with `way` for a while; a line about it."""
    order = Order("train", way.shuffle, seed=0, num_samples=len(source), shard_sizes=source.shard_sizes)
    handles = [os.open(path, os.O_RDONLY) for path in paths]
    for handle in handles:
        os.posix_fadvise(handle, 0, 0, way.advice)
    offsets_N, sizes_N = source._offsets_N, source.sizes_N

    def each(position: int, do: Callable[[int, int, int], object]) -> None:
        for index in order.at(epoch, np.arange(position, min(position + BATCH, len(source)))).tolist():
            do(handles[source.location(index)[0]], int(sizes_N[index]), int(offsets_N[index]))

    def ask(handle: int, size: int, offset: int) -> None:
        os.posix_fadvise(handle, offset, size, os.POSIX_FADV_WILLNEED)

    read_before, began, count, num_bytes = disk_bytes(), time.perf_counter(), 0, 0
    with ThreadPoolExecutor(threads) as pool:
        for position in range(0, len(source), BATCH):
            if way.ask_ahead:
                first = 0 if position == 0 else AHEAD
                for ahead in range(first, AHEAD + 1):
                    if position + ahead * BATCH < len(source):
                        each(position + ahead * BATCH, ask)
            wanted: list[tuple[int, int, int]] = []
            each(position, lambda *place: wanted.append(place))  # noqa: B023
            num_bytes += sum(len(content) for content in pool.map(lambda place: os.pread(*place), wanted))
            count += len(wanted)
            if time.perf_counter() - began > seconds:
                break
    took = time.perf_counter() - began
    from_disk = (disk_bytes() - read_before) / num_bytes
    for handle in handles:
        os.close(handle)
    return f"{count / took:8.0f} images/s {num_bytes / took / 2**20:8.0f} MiB/s   disk ÷ samples {from_disk:5.2f}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seconds", type=float, default=5)
    parser.add_argument("--threads", type=int, nargs="*", default=[1, 8])
    arguments = parser.parse_args()
    files = [arguments.folder / shard.file for shard in read_index(arguments.folder).splits["train"].shards]
    records = open_records(str(arguments.folder), "train")
    for number_of_threads in arguments.threads:
        for number, tried in enumerate(WAYS):
            drop(files)
            line = measure(files, records, tried, number_of_threads, arguments.seconds, number)
            print(f"cold, {number_of_threads} threads, {tried.name:45} {line}", flush=True)
        for path in files:
            path.read_bytes()
        line = measure(files, records, WAYS[0], number_of_threads, arguments.seconds, 0)
        print(f"warm, {number_of_threads} threads, {WAYS[0].name:45} {line}", flush=True)
