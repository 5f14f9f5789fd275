"""The second simulator as searchers see the first: points as mappings, probes that may end early, groups that go on.

A probe's steps after the one that it ends with are taken back from the testbed's clock.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from types import SimpleNamespace
from typing import Any

from tests.benchmarks.simulation.cluster import LEAN_STEPS, WARM_UP_STEPS, Point, as_figure
from tests.benchmarks.simulation.parts import Floats
from tests.benchmarks.simulation.session import CHECK_EVERY, OOM_S, STEPS, Probe
from tests.benchmarks.simulation_b import PHASES, Testbed, Truth, bottleneck, draw_cluster, truth
from tests.benchmarks.simulation_b import Point as PointB

KEYS = {
    "scale.num_workers": "num_workers",
    "data.global_batch_size": "global_batch_size",
    "data.loader_workers": "loader_workers",
    "precision": "precision",
}
SETUP_S, TUNING_S = 2.0, 5.6
"""Seconds to set up a point: models built; and what its first steps take longer, the mean of what the testbed draws."""


class ClusterB:
    """A cluster of the second simulator; even seeds have 320 points, odd ones 700."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.cluster = cluster = draw_cluster(seed, 700 if seed % 2 else 320)
        keys = [key for key in KEYS if key != "precision" or len({point.precision for point in cluster.points}) > 1]
        self.points: list[Point] = [{key: getattr(point, KEYS[key]) for key in keys} for point in cluster.points]
        self._index = {tuple(sorted(point.items())): index for index, point in enumerate(self.points)}
        gpus, nodes = cluster.gpus_per_node, -(-len(cluster.rank_gpu_speed) // cluster.gpus_per_node)
        self.plant = SimpleNamespace(
            nodes=nodes,
            gpus_per_node=gpus,
            cpu=SimpleNamespace(threads=2 * cluster.cores),
            memory=SimpleNamespace(gpu_mib=1024 * cluster.gpu.memory_gib),
            num_images=cluster.dataset_images,
        )
        self.tenant = cluster.tenant
        self.possible = self.points

    def session(self, seed: int) -> "SessionB":
        return SessionB(self, seed)

    @cached_property
    def kind(self) -> str:
        return bottleneck(self.cluster)

    @cached_property
    def whole(self) -> Truth:
        return truth(self.cluster)

    def index(self, point: Point) -> int:
        return self._index[tuple(sorted(point.items()))]

    def truth(self, point: Point) -> float:
        return float(self.whole.step_time_s[self.index(point)])

    def status(self, point: Point) -> str:
        return "ok" if self.whole.fits[self.index(point)] else "oom"

    def figure(self, point: Point, metric: str = "images_per_s") -> float:
        return as_figure(point, self.truth(point), self.plant.num_images, metric)

    def regret(self, point: Point | None, metric: str = "images_per_s") -> float:
        """Share that the best point is better by; 1 for none, and for one that does not fit in a long run."""
        if point is None or self.status(point) != "ok":
            return 1.0
        best = max(self.figure(other, metric) for other in self.points if self.status(other) == "ok")
        figure = self.figure(point, metric)
        return 1.0 - figure / best if best > 0 else 1.0 - best / figure

    @cached_property
    def lean_grid_gpu_s(self) -> float:
        """As of the first simulator."""
        runs = [point for point in self.points if self.status(point) == "ok"]
        starts = sum({int(point["scale.num_workers"]) for point in runs}) * self.cluster.startup_s
        steps = WARM_UP_STEPS + LEAN_STEPS
        return starts + sum(int(p["scale.num_workers"]) * (SETUP_S + TUNING_S + steps * self.truth(p)) for p in runs)


class SessionB:
    """As `Session` of the first simulator."""

    def __init__(self, cluster: ClusterB, seed: int) -> None:
        self.cluster, self.gpu_s, self.num_probes, self.group = cluster, 0.0, 0, 0
        self._testbed = Testbed(cluster.cluster, seed)

    @property
    def lean_grids(self) -> float:
        return self.gpu_s / self.cluster.lean_grid_gpu_s

    @property
    def clock_s(self) -> float:
        return self._testbed.now_s

    def probe(self, point: Point, steps: int = STEPS, should_stop: Callable[[Floats], bool] | None = None) -> Probe:
        """Measure at most `steps` steps after the warm-up; `should_stop` may end it before."""
        testbed, workers = self._testbed, int(point["scale.num_workers"])
        is_new = workers != self.group
        self.group, self.num_probes = workers, self.num_probes + 1
        began_s = testbed.now_s
        testbed.cluster = replace(self.cluster.cluster, startup_s=SETUP_S + is_new * self.cluster.cluster.startup_s)
        named: dict[str, Any] = {KEYS[key]: value for key, value in point.items()}
        trial = testbed.measure(PointB(**named), WARM_UP_STEPS + steps)
        start_s = trial.startup_s - SETUP_S if is_new else None
        times_s, outcome = trial.step_times_s[WARM_UP_STEPS:], trial.outcome
        if outcome != "ok" and not len(trial.step_times_s):
            testbed.now_s += OOM_S if outcome == "oom" else 0.0
        num = next((k for k in range(CHECK_EVERY, len(times_s), CHECK_EVERY) if should_stop and should_stop(times_s[:k])), None)
        if num is not None:
            outcome = "ok"
            testbed.now_s -= float(times_s[num:].sum())
            times_s = times_s[:num]
        seconds = testbed.now_s - began_s
        self.gpu_s += workers * seconds
        if outcome != "ok":
            self.group = 0
            return Probe(point, outcome, start_s=start_s, seconds=seconds)
        means = trial.phases_s[WARM_UP_STEPS : WARM_UP_STEPS + len(times_s)].mean(axis=0)
        phases_s = dict(zip(PHASES, means.tolist(), strict=True))
        phases_s["data"] = phases_s.pop("data_wait")
        phases_s["backward"] += phases_s.pop("all_reduce_wait")
        gpu_mib = self.cluster.plant.memory.gpu_mib
        peak_mib = trial.peak_memory_fraction * gpu_mib
        return Probe(point, "ok", times_s, phases_s, peak_mib, start_s, seconds)
