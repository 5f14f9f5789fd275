"""What taps cost: a training step of a model that is read beside the same step of one that is not, in time and in memory.

Time by blocks of steps that take turns, as processor time: nothing here waits for anything, and other work on the machine does
not count. Memory is torch's own account of what its CPU allocator holds: the step's peak with taps beside the peak without them
plus the kept tensors, which a method holds until the backward has ended.
"""

import contextlib
import gc
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from tests.benchmarks.process import answer_of
from tests.benchmarks.rounds import Bar, Comparison
from trainables.models.registry import construct
from trainables.models.taps import Taps
from trainables.worker.trainer import CPU_MALLOC


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
        with self._taps.capture():
            logits_BK = self._model(self._images_BCHW)
            kept = self._taps.pop()
        logits_BK.square().sum().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        return kept


@contextlib.contextmanager
def comparisons(short: bool) -> Iterator[list[Comparison]]:
    yield [line for number in range(len(CASES)) for line in compare(number, 2 if short else 24)]


def compare(number: int, blocks: int) -> list[Comparison]:
    """Both lines of a case are of the same rounds, each in a new process with the allocator that a worker on a CPU has."""
    case = CASES[number]
    peaks: dict[int, tuple[float, float]] = {}

    def measure(round_number: int) -> tuple[float, float]:
        found = answer_of(["-m", "tests.benchmarks.taps", str(number), str(blocks)], **CPU_MALLOC)
        peaks[round_number] = found["peak_mib"], found["allowed_mib"]
        return found["tapped_s"], found["bare_s"]

    title = f"taps, {case.model} at {case.image_size} pixels, {', '.join(case.taps)}"
    return [
        Comparison(f"{title}: read / not read", "s/step", measure, Bar("≤", 1.01)),
        Comparison(f"{title}: peak of a step / peak without taps + what is kept", "MiB", peaks.__getitem__, Bar("≤", 1.0)),
    ]


def main(number: int, blocks: int) -> None:
    """One round of a case."""
    torch.set_num_threads(1)
    case = CASES[number]
    tapped, bare = Trained(case, case.taps), Trained(case, ())
    tapped_s, bare_s = step_s(tapped, bare, case.steps, blocks)
    allowed = peak_bytes(bare) + kept_bytes(tapped)
    found = {"tapped_s": tapped_s, "bare_s": bare_s, "peak_mib": peak_bytes(tapped) / 2**20, "allowed_mib": allowed / 2**20}
    print(json.dumps(found))


def step_s(tapped: Trained, bare: Trained, steps: int, blocks: int) -> tuple[float, float]:
    """The bare side's median over blocks, times the median ratio of a block to its neighbour; and that median."""
    taken: dict[Trained, list[float]] = {tapped: [], bare: []}
    for side in (tapped, bare):
        side.step()
    for number in range(blocks):
        for side in ((tapped, bare), (bare, tapped))[number % 2]:
            began = time.process_time()
            for _ in range(steps):
                side.step()
            taken[side].append((time.process_time() - began) / steps)
    bare_s = statistics.median(taken[bare])
    return bare_s * statistics.median(ours / peer for ours, peer in zip(taken[tapped], taken[bare], strict=True)), bare_s


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
    """Of the kept tensors, which live through the backward."""
    memories = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tapped.step()}
    return sum(memories.values())


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
