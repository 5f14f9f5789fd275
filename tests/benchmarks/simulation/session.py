"""A searcher's time on a cluster: probes one after the other, and the GPU-seconds that they cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from tests.benchmarks.simulation.cluster import Cluster, Point
from tests.benchmarks.simulation.parts import Floats

GRID_WARM_UP, GRID_STEPS = 50, 200
"""What the whole grid measures of every point."""
WARM_UP = 10
OOM_S = 5.0
"""What a probe lasts, after its start, until it is out of memory."""
CHECK_EVERY, MIN_STEPS = 5, 5


@dataclass(frozen=True)
class Probe:
    """One visit to a point."""

    point: Point
    status: str
    steps_s: Floats = field(default_factory=lambda: np.empty(0))
    phases_s: dict[str, float] = field(default_factory=dict)
    peak_memory_mib: float | None = None
    start_s: float | None = None
    """Of the worker group; None where it was there already."""

    @property
    def images_per_s(self) -> float:
        """0 where nothing was measured."""
        return float(self.point["data.global_batch_size"] / self.steps_s.mean()) if len(self.steps_s) else 0.0


class Session:
    """Keeps the account. A worker group is started anew where its size changes from the probe before; what a plan can see to be
    infeasible costs nothing."""

    def __init__(self, cluster: Cluster, seed: int) -> None:
        self.cluster = cluster
        self.gpu_s, self.num_probes = 0.0, 0
        self._rng = np.random.default_rng([cluster.seed, seed, 7])
        self._clock_s = 0.0
        self.group = 0
        """Workers of the group that is there; 0 where none is."""

    def probe(self, point: Point, steps: int, warm_up: int = WARM_UP, enough: Callable[[Floats], bool] | None = None) -> Probe:
        """Measure at most `steps` steps after the warm-up, which is paid for too; `enough` may end it before."""
        plant = self.cluster.plant
        measured = self.cluster.measure(point, steps, self._rng, warm_up, self._clock_s)
        if measured == "infeasible":
            return Probe(point, "infeasible")
        num_workers = point["scale.num_workers"]
        start_s = plant.start_s if num_workers != self.group else None
        self.group, self.num_probes = num_workers, self.num_probes + 1
        if isinstance(measured, str):
            self.group = 0  # a group that ran out of memory is not used again
            self._pay(num_workers, (start_s or 0.0) + OOM_S)
            return Probe(point, measured, start_s=start_s)
        num = next((k for k in range(MIN_STEPS, steps, CHECK_EVERY) if enough and enough(measured.steps_s[:k])), steps)
        steps_s = measured.steps_s[:num]
        self._pay(num_workers, (start_s or 0.0) + measured.warm_up_s + float(steps_s.sum()))
        phases_s = {phase: float(seconds[:num].mean()) for phase, seconds in measured.phases_s.items()}
        return Probe(point, "ok", steps_s, phases_s, measured.peak_memory_mib, start_s)

    def _pay(self, num_workers: int, seconds: float) -> None:
        self.gpu_s += num_workers * seconds
        self._clock_s += seconds


def grid_gpu_s(cluster: Cluster) -> float:
    """GPU-seconds of measuring every point that there is anything to measure of, each with a start of its own."""
    steps = GRID_WARM_UP + GRID_STEPS
    return sum(
        point["scale.num_workers"] * (cluster.plant.start_s + steps * cluster.truth(point))
        for point in cluster.points
        if cluster.status(point) == "ok"
    )
