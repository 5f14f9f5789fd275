"""A made-up cluster: loaders fill a bounded queue, workers empty it, a ring sums up. It shares no formula with the model."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from service.runs.result import ClusterHardware
from service.search.planner import Planner
from service.search.points import Observation

QUEUE, STEPS = 4, 60


def point(workers: int, batch: int, threads: int, **more: Any) -> dict[str, Any]:
    axes = {"scale.num_workers": workers, "data.global_batch_size": batch, "data.loader_workers": threads}
    return {**axes, **{key.replace("__", "."): value for key, value in more.items()}}


def grid(workers: list[int], batches: list[int], threads: list[int]) -> list[dict[str, Any]]:
    return [point(*axes) for axes in product(workers, batches, threads)]


@dataclass(frozen=True)
class Queues:
    """Times in seconds, memory in MiB."""

    hardware: ClusterHardware
    image_decode_s: float = 0.004
    image_gpu_s: float = 0.001
    launch_s: float = 0.02
    gradients_s: float = 0.01  # of the ring, for each further worker
    base_mib: float = 1000.0
    image_mib: float = 40.0
    gpu_mib: float = 16000.0
    faster: float = 1.0  # what `train.precision: bf16` does to the GPU's time

    def batch(self, at: Mapping[str, Any]) -> int:
        return math.ceil(at["data.global_batch_size"] / at["scale.num_workers"])

    def fits(self, at: Mapping[str, Any]) -> bool:
        return self.base_mib + self.image_mib * self.batch(at) <= self.gpu_mib

    def parts(self, at: Mapping[str, Any]) -> tuple[float, float]:
        """Mean seconds of a step, and of its wait for data."""
        workers, threads, batch = at["scale.num_workers"], max(at["data.loader_workers"], 1), self.batch(at)
        together = min(workers, self.hardware.slots_per_node)
        speed = min(1.0, self.hardware.cpus_per_node / (threads * together))  # threads take turns on the cores
        decode_s = batch * self.image_decode_s / speed  # of one batch by one thread
        gpu_s = self.launch_s + self.image_gpu_s * batch * (self.faster if at.get("train.precision") == "bf16" else 1)
        gpu_s += self.gradients_s * math.log2(workers)
        ready, done = [0.0] * threads, [0.0] * (QUEUE + threads)  # a thread starts when it is idle and the queue has room
        waited = 0.0
        for step in range(STEPS):
            thread = step % threads
            ready[thread] = max(ready[thread], done[step]) + decode_s
            start = max(ready[thread], done[-1])
            waited += start - done[-1] if step >= STEPS // 2 else 0.0
            done.append(start + gpu_s)
        half = STEPS - STEPS // 2
        return (done[-1] - done[-1 - half]) / half, waited / half

    def steps_s(self, at: Mapping[str, Any], rng: np.random.Generator) -> Iterator[float]:
        """Steps with 5% of noise, one in twenty up to 80% slower."""
        mean, _ = self.parts(at)
        while True:
            yield mean * float(np.exp(rng.normal(0, 0.05))) * (1 + float(rng.random() < 0.05) * float(rng.uniform(0, 0.8)))

    def probe(self, at: Mapping[str, Any], search: Planner, rng: np.random.Generator) -> Observation:
        if not self.fits(at):
            return Observation("oom", gpu_memory_mib=self.gpu_mib)
        taken: list[float] = []
        for step_s in self.steps_s(at, rng):
            taken.append(step_s)
            if search.should_stop(taken, at):
                break
        mean, data = self.parts(at)
        rest = mean - data
        phases = {"data": data, "teacher": 0.2 * rest, "student": 0.2 * rest, "backward": 0.55 * rest, "optimizer": 0.05 * rest}
        return Observation("ok", taken, phases, self.base_mib + self.image_mib * self.batch(at), self.gpu_mib)

    def cost(self, at: Mapping[str, Any], metric: str = "images_per_s") -> float:
        """What is made small: seconds of an image, or GPU-seconds."""
        mean, _ = self.parts(at)
        return mean / at["data.global_batch_size"] * (at["scale.num_workers"] if metric == "gpu_s_per_epoch" else 1)

    def search(self, search: Planner, seed: int = 0, at_most: int = 200) -> list[tuple[Mapping[str, Any], Observation]]:
        """Probe what the search asks for, to its end."""
        rng, seen, group = np.random.default_rng(seed), [], None
        while (at := search.ask(group)) is not None:
            group = float(at["scale.num_workers"])
            seen.append((at, self.probe(at, search, rng)))
            search.tell(*seen[-1])
            assert len(seen) <= at_most
        return seen

    def regret(self, search: Planner, metric: str = "images_per_s") -> float:
        """How much dearer the found point is than the best of all."""
        best = search.best()
        assert best is not None
        return self.cost(best, metric) / min(self.cost(at, metric) for at in search.points if self.fits(at)) - 1


ONE_NODE = ClusterHardware(nodes=1, slots_per_node=4, cpus_per_node=16)
FOUR_NODES = ClusterHardware(nodes=4, slots_per_node=4, cpus_per_node=16)
SMALL = grid([1, 2, 4], [64, 128, 256, 512, 1024], [1, 2, 4, 8])
LARGE = grid([1, 2, 4, 8, 16], [64, 128, 256, 512, 1024, 2048], [1, 2, 3, 4, 6, 8])
CLUSTERS = {
    "decode": (Queues(ONE_NODE, image_decode_s=0.02), SMALL),
    "compute": (Queues(ONE_NODE, image_decode_s=0.001, image_gpu_s=0.004), SMALL),
    "network": (Queues(FOUR_NODES, gradients_s=0.3), LARGE),
    "memory": (Queues(FOUR_NODES, image_mib=120), LARGE),
}
