"""How much slower a step is while its loader's threads compute: they share caches, memory and Python's lock with it."""

import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from statistics import median

from trainables.data.loader.loader import Loader
from trainables.engine.pass_latency import passes_s, unchanged
from trainables.engine.step import TrainState

_MAX_S, _MOST_ROUNDS, _ROUND_S = 1.0, 15, 0.05


def loading_slowdown(train_state: TrainState, image_size: int, micro_batch: int, loader: Loader, epoch: int) -> float:
    """How many times as long the passes on a micro-batch take while `loader` loads this epoch at full speed.

    The median over rounds of both in turn, within a second or so: a machine whose speed changes changes it for both. Of the
    training nothing is changed, see `pass_latency`; of the loader `skipped` and `costs`.

    Raises what the loader raises.
    """

    def round_s(count: int) -> float:
        return sum(passes_s(train_state, image_size, micro_batch) for _ in range(count))

    ratios, until_s = list[float](), time.perf_counter() + _MAX_S
    with unchanged(train_state.distillation_module):
        count = max(1, round(_ROUND_S / round_s(1)))
        while not ratios or (len(ratios) < _MOST_ROUNDS and time.perf_counter() < until_s):
            alone_s = round_s(count)
            with loading(loader, epoch):
                ratios.append(round_s(count) / alone_s)
    return median(ratios)


@contextlib.contextmanager
def loading(loader: Loader, epoch: int) -> Iterator[None]:
    """Inside, the loader's threads load at full speed: batches are drawn as they come, and thrown away."""
    ended = threading.Event()

    def draw() -> None:
        with contextlib.suppress(CancelledError):
            while not ended.is_set():
                with contextlib.closing(loader.epoch(epoch)) as batches:
                    while not ended.is_set() and next(batches, None) is not None:
                        pass

    with ThreadPoolExecutor(1) as pool:
        drawing = pool.submit(draw)
        try:
            yield
        finally:
            ended.set()
            loader.stop()
            drawing.result()
