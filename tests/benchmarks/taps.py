"""What taps cost: a training step of a model that is read beside the same step of one that is not, in time and in memory.

Time by blocks of steps that take turns, as processor time: nothing here waits for anything, and other work on the machine does
not count. Memory is torch's own account of what its CPU allocator holds: the step's peak with taps beside the peak without them
plus the kept tensors that the backward does not hold anyway.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from tests.benchmarks.rounds import Bar, Comparison
from trainables.models.registry import construct
from trainables.models.taps import Taps


@dataclass(frozen=True)
class Case:
    model: str
    image_size: int
    batch_size: int
    taps: tuple[str, ...]
    steps: int
    """Of a block: about 50 ms of them."""


CASES = (
    Case("resnet20", 32, 32, ("stem", "stages", "stages.preact", "pooled"), 1),
    Case("convnet_small", 8, 64, ("stages", "pooled"), 20),
    Case("resnet18", 32, 16, ("stages", "stages.preact", "pooled"), 1),
)


class Trained:
    """A model in training, read where `taps` names something."""

    def __init__(self, case: Case, taps: Sequence[str]) -> None:
        generator = torch.Generator().manual_seed(0)
        self._images_BCHW = torch.randn(case.batch_size, 3, case.image_size, case.image_size, generator=generator)
        self._model = construct(case.model, num_classes=10, image_size=case.image_size, seed=0)
        self._taps = Taps(self._model, taps, name=case.model, image_size=case.image_size)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=1e-6)

    def step(self) -> tuple[Tensor, ...]:
        """What was read; it lives through the backward, as for a method."""
        with self._taps.reading():
            logits_BK = self._model(self._images_BCHW)
            kept = self._taps.take()
        logits_BK.square().sum().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return kept


@contextlib.contextmanager
def comparisons(short: bool) -> Iterator[list[Comparison]]:
    torch.set_num_threads(1)
    lines = []
    for case in CASES:
        title = f"taps, {case.model} at {case.image_size} pixels, {', '.join(case.taps)}"
        tapped, bare = Trained(case, case.taps), Trained(case, ())
        lines += [
            Comparison(
                f"{title}: read / not read", "s/step",
                lambda _, tapped=tapped, bare=bare, steps=case.steps: step_s(tapped, bare, steps, 2 if short else 24),
                Bar("≤", 1.01),
            ),
            Comparison(
                f"{title}: peak of a step / peak without taps + what is kept", "MiB",
                lambda _, tapped=tapped, bare=bare: peaks_mib(tapped, bare), Bar("≤", 1.0),
            ),
        ]  # fmt: skip
    yield lines


def step_s(tapped: Trained, bare: Trained, steps: int, blocks: int) -> tuple[float, float]:
    """The bare side's median over blocks, times the median ratio of a block to its neighbour; and that median."""
    taken: dict[Trained, list[float]] = {tapped: [], bare: []}
    for number in range(blocks):
        for side in ((tapped, bare), (bare, tapped))[number % 2]:
            began = time.process_time()
            for _ in range(steps):
                side.step()
            taken[side].append((time.process_time() - began) / steps)
    bare_s = statistics.median(taken[bare])
    return bare_s * statistics.median(ours / peer for ours, peer in zip(taken[tapped], taken[bare], strict=True)), bare_s


def peaks_mib(tapped: Trained, bare: Trained) -> tuple[float, float]:
    """Peak with taps; peak without, plus the bytes of what is kept."""
    return peak_bytes(tapped) / 2**20, (peak_bytes(bare) + kept_bytes(tapped)) / 2**20


def peak_bytes(side: Trained) -> int:
    """The most that a step allocates beyond what there is before it."""
    side.step()
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as watched:
        side.step()
    results = watched.profiler.kineto_results
    changes = sorted((event.start_ns(), event.nbytes()) for event in results.events() if event.name() == "[memory]")
    return max(accumulate(num_bytes for _, num_bytes in changes))


def kept_bytes(tapped: Trained) -> int:
    """Of the kept tensors that the backward does not keep for itself."""
    saved: set[int] = set()

    def pack(tensor: Tensor) -> Tensor:
        saved.add(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tapped.step()}
    return sum(num_bytes for pointer, num_bytes in kept.items() if pointer not in saved)
