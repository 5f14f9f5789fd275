"""What loader threads do to a step that launches small operations without pause, as a GPU's does, and the step to them.

The "decoding" only sleeps, 1 ms an image, so that nothing but Python's lock is contended on 2 cores: once with the loader's
threads in the training process, once in a process of their own. The loader is held to a rate that both can reach.
"""

import argparse
import contextlib
import json
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from tests.benchmarks.process import answer_of
from tests.benchmarks.rounds import Bar, Comparison, Sides
from tests.benchmarks.sleeping_source import SIZE, SleepingSource
from trainables.config import DataConfig
from trainables.data.loader.loader import Loader
from trainables.data.loader.loader_process import ProcessReader

BATCHES, IMAGES_PER_S, THREADS = (256, 64), 4000.0, 16  # a batch costs the training thread the same, whatever its size


@contextlib.contextmanager
def comparisons(short: bool) -> Iterator[list[Comparison]]:
    seconds = str(0.5 if short else 5.0)
    command = ["-m", "tests.benchmarks.launches"]
    large, small = (
        Sides({side: partial(answer_of, [*command, side, str(batch), seconds]) for side in ("threads", "process")})
        for batch in BATCHES
    )
    yield [
        Comparison(
            f"time per operation beside a loader at {IMAGES_PER_S:,.0f} images/s / alone, a process (peer: threads)",
            "×",
            large.pair("process", "threads", "op_ratio"),
            Bar("≤", 1.15),
            lambda ours, peer: ours,
            "ours",
        ),
        Comparison(
            "loader beside a busy step / alone, a process (peer: threads)",
            "×",
            large.pair("process", "threads", "loader_ratio"),
            Bar("≥", 0.95),
            lambda ours, peer: ours,
            "ours",
        ),
        *(
            Comparison(
                f"GIL held by the training thread to take a batch of {batch}, an image, a process (peer: threads)",
                "µs",
                sides.pair("process", "threads", "gil_us"),
                Bar("≤", 2.0),
                lambda ours, peer: ours,
                "ours",
            )
            for batch, sides in zip(BATCHES, (large, small), strict=True)
        ),
    ]


def measure(where: str, batch: int, seconds: float) -> dict[str, float]:
    torch.set_num_threads(1)
    data = DataConfig.model_validate(
        {"image_size": SIZE, "global_batch_size": batch, "loader_workers": THREADS, "loader": where, "augment": "none"}
    )
    source = SleepingSource(10_000_000)
    loader = Loader(source, data, split="train", seed=0, rank=0, world_size=1, loader_workers=THREADS)
    socket = None
    if isinstance(loader._reader, ProcessReader):
        socket = _Socket(loader._reader._connection)
        loader._reader._connection = socket  # type: ignore[assignment]
    batches = loader.epoch(0)
    for _ in range(10):
        next(batches)
    alone_s, _ = _launch(seconds, lambda: None)
    step = _Steps(batches, batch)
    if socket:
        socket.cpu_s = 0.0
    beside_s, _ = _launch(seconds, step.take_due)
    gil_s = step.cpu_s - (socket.cpu_s if socket else 0.0)
    loader_alone = _rate(batches, batch, seconds)
    stop = threading.Event()
    busy = threading.Thread(target=_busy, args=(stop,))
    busy.start()
    loader_beside = _rate(batches, batch, seconds)
    stop.set()
    busy.join()
    batches.close()
    loader.close()
    return {
        "alone_us": 1e6 * alone_s,
        "beside_us": 1e6 * beside_s,
        "op_ratio": beside_s / alone_s,
        "images_per_s": step.taken * batch / seconds,
        "image_us": 1e6 * step.cpu_s / (step.taken * batch),
        "gil_us": 1e6 * gil_s / (step.taken * batch),
        "loader_alone": loader_alone,
        "loader_beside": loader_beside,
        "loader_ratio": loader_beside / loader_alone,
    }


class _Socket:
    """A connection, and the CPU-seconds inside it, which it spends in the kernel, without the GIL."""

    def __init__(self, connection: Any) -> None:
        self._connection, self.cpu_s = connection, 0.0

    def send_bytes(self, content: bytes) -> None:
        began_s = time.thread_time()
        self._connection.send_bytes(content)
        self.cpu_s += time.thread_time() - began_s

    def recv(self) -> Any:
        began_s = time.thread_time()
        content: bytes = self._connection.recv_bytes()
        self.cpu_s += time.thread_time() - began_s
        return pickle.loads(content)

    def close(self) -> None:
        self._connection.close()

    @property
    def closed(self) -> bool:
        return bool(self._connection.closed)


class _Steps:
    """Takes a batch as often as the rate says."""

    def __init__(self, batches: Iterator[object], batch: int) -> None:
        self._batches, self._batch, self._began_s = batches, batch, time.perf_counter()
        self.taken, self.cpu_s = 0, 0.0

    def take_due(self) -> None:
        if time.perf_counter() - self._began_s > self.taken * self._batch / IMAGES_PER_S:
            began_s = time.thread_time()
            next(self._batches)
            self.cpu_s += time.thread_time() - began_s
            self.taken += 1


def _launch(seconds: float, between: Callable[[], None]) -> tuple[float, int]:
    """Mean seconds of an operation, and how many there were; `between` is called every hundred."""
    values, num_operations, operations_s = torch.zeros(8), 0, 0.0
    until_s = time.perf_counter() + seconds
    while time.perf_counter() < until_s:
        began_s = time.perf_counter()
        for _ in range(100):
            values.add_(1.0)
        operations_s += time.perf_counter() - began_s
        num_operations += 100
        between()
    return operations_s / num_operations, num_operations


def _busy(stop: threading.Event) -> None:
    values = torch.zeros(8)
    while not stop.is_set():
        for _ in range(100):
            values.add_(1.0)


def _rate(batches: Iterator[object], batch: int, seconds: float) -> float:
    began_s, images = time.perf_counter(), 0
    while (took_s := time.perf_counter() - began_s) < seconds:
        next(batches)
        images += batch
    return images / took_s


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("where", choices=["threads", "process"])
    parser.add_argument("batch", type=int)
    parser.add_argument("seconds", type=float)
    print(json.dumps(measure(**vars(parser.parse_args()))))
